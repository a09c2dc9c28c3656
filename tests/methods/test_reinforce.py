import math

import pytest
import torch
from helpers import (
    advantages,
    close,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    on_policy,
    outcome_only,
    policy_gradient,
)

from methods._case import Case
from methods.loops import (
    Numbers,
    centred,
    mean,
    number,
    others_mean,
    ratio,
    returns,
    score,
    seq_mean_token_sum,
    sequence_ratio,
    token_rewards,
    tokens,
    unclipped,
    weighted_score,
    z_scores,
)
from proxpo import Batch


def reinforce(b: Batch, *, baseline: str = "group", gamma: float = 1.0) -> Numbers:
    b0 = b
    total = returns(token_rewards(b0), b0, gamma=gamma)
    r = b.rewards.tolist()
    base = {
        "batch": lambda: dict.fromkeys(range(len(r)), mean(r)),
        "group": lambda: {i: r[i] - c for i, c in centred(b).items()},
        "leave_one_out": lambda: others_mean(b),
    }[baseline]()
    return {(i, t): total[i, t] - base[i] for i, t in tokens(b)}


def truncated_reinforce(b: Batch, cap: float, *, sequence: bool) -> torch.Tensor:
    r = sequence_ratio(b, anchor=b.rollout_logp, normalise=False) if sequence else None
    r = ratio(b, b.rollout_logp) if r is None else r
    w = {k: min(number(v), cap) for k, v in r.items()}
    return seq_mean_token_sum(weighted_score(w, reinforce(b), b), b)


CASES = {
    "reinforce": Case("reinforce", {}, lambda b: seq_mean_token_sum(score(reinforce(b), b), b)),
    "reinforce-ratio": Case(
        "reinforce",
        {"form": "ratio"},
        lambda b: seq_mean_token_sum(unclipped(ratio(b), reinforce(b)), b),
    ),
    "reinforce-truncated": Case(
        "reinforce",
        {"form": "truncated", "cap": 1.1},
        lambda b: truncated_reinforce(b, 1.1, sequence=False),
    ),
    "reinforce-truncated-seq": Case(
        "reinforce",
        {"form": "truncated", "cap": 1.3, "level": "sequence"},
        lambda b: truncated_reinforce(b, 1.3, sequence=True),
    ),
    "reinforce-discounted": Case(
        "reinforce",
        {"gamma": 0.9, "baseline": "leave_one_out"},
        lambda b: seq_mean_token_sum(
            score(reinforce(b, gamma=0.9, baseline="leave_one_out"), b), b
        ),
    ),
    "reinforce-batch-baseline": Case(
        "reinforce",
        {"baseline": "batch"},
        lambda b: seq_mean_token_sum(score(reinforce(b, baseline="batch"), b), b),
    ),
    "reinforce-standardised": Case(
        "reinforce", {"standardise": True}, lambda b: seq_mean_token_sum(score(z_scores(b), b), b)
    ),
}


@pytest.mark.checks("reinforce", "dloss/dlogp = -A·c with c = 1/B or 1/N, whatever logp is")
@pytest.mark.parametrize("average", ["seq_mean_token_sum", "token_mean"])
def test_gradient_is_the_advantage(average: str) -> None:
    made = method("reinforce", aggregate=average)
    for batch in (make_batch(1), make_batch(1).replace(logp=make_batch(2).logp)):
        rows, n = len(batch.mask), int(batch.mask.sum())
        weight = 1 / rows if average == "seq_mean_token_sum" else 1 / n
        close(policy_gradient(made, batch), -advantages(made, batch) * weight)


@pytest.mark.checks("reinforce", "score form and ratio form: equal gradients, different values")
def test_forms_share_the_gradient_on_policy() -> None:
    batch = on_policy(make_batch(1))
    score, ratio = method("reinforce"), method("reinforce", form="ratio")
    (a, ga), (b, gb) = (loss_and_gradients(made, batch) for made in (score, ratio))
    close(ga, gb)
    assert abs(a - b) > 0.1


def test_forms_differ_off_policy() -> None:
    batch = make_batch(1)
    score, ratio = method("reinforce"), method("reinforce", form="ratio")
    r = (batch.logp - batch.old_logp).exp()
    close(policy_gradient(ratio, batch), r * policy_gradient(score, batch))


@pytest.mark.checks("reinforce", "PPO, GSPO, SAPO, CISPO and GMPO have its gradient at r = 1")
@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("ppo", {"value": None}),
        ("grpo", {}),
        ("gspo", {}),
        ("gspo", {"variant": "token"}),
        ("sapo", {"tau_pos": 0.3, "tau_neg": 7.0}),
        ("cispo", {}),
        ("gmpo", {}),
        ("kpo", {}),
    ],
)
def test_ratio_methods_reduce_to_it(slug: str, options: dict) -> None:
    batch = on_policy(make_batch(1))
    same = {"advantage": "group_relative", "aggregate": "seq_mean_token_mean"}
    expected = policy_gradient(method("reinforce", **same), batch)
    close(policy_gradient(method(slug, **options, **same), batch), expected)


@pytest.mark.checks("reinforce", "off-policy weights without a cap: the gradient of -A·r")
def test_uncapped_weights_are_importance_sampling() -> None:
    batch = make_batch(1)
    weighted = method("reinforce", form="truncated", cap=math.inf)
    unclipped = method("reinforce", form="ratio", **{"ratio.anchor": "rollout"})
    close(policy_gradient(weighted, batch), policy_gradient(unclipped, batch))
    capped = policy_gradient(method("reinforce", form="truncated", cap=1.0), batch)
    assert not torch.allclose(capped, policy_gradient(unclipped, batch))


@pytest.mark.checks("reinforce", "a constant added to all rewards changes nothing")
@pytest.mark.parametrize("baseline", ["batch", "group", "leave_one_out"])
def test_reward_shift(baseline: str) -> None:
    made, batch = method("reinforce", baseline=baseline), make_batch(1)
    shifted = batch.replace(rewards=batch.rewards + 7.0)
    close(advantages(made, shifted), advantages(made, batch), atol=1e-11)
    raw = method("reinforce", baseline="none")
    close(advantages(raw, shifted), advantages(raw, batch) + 7.0 * batch.mask)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_response_alone_in_its_group_has_no_advantage(baseline: str, gamma: float) -> None:
    batch = outcome_only(make_batch(1, groups=4, size=1))
    found = advantages(method("reinforce", baseline=baseline, gamma=gamma), batch)
    close(found, torch.zeros_like(found))


def test_empty_row_is_not_counted() -> None:
    batch = make_batch(1)
    mask = batch.mask.clone()
    mask[4] = False
    made = method("reinforce", baseline="none")
    found = policy_gradient(made, batch.replace(mask=mask))
    close(found, -advantages(made, batch.replace(mask=mask)) / (len(mask) - 1))


def test_masked_tokens_carry_the_return_through() -> None:
    batch = outcome_only(make_batch(1, groups=1, size=1, tokens=5))
    batch = batch.replace(mask=torch.tensor([[True, False, False, True, True]]))
    found = advantages(method("reinforce", baseline="none", gamma=0.5), batch)
    close(found[0], batch.rewards[0] * f64([0.25, 0.0, 0.0, 0.5, 1.0]))
