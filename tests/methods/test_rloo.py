import math

import pytest
import torch
from helpers import (
    advantages,
    close,
    crafted,
    f64,
    make_batch,
    method,
    on_policy,
    outcome_only,
    per_row,
    policy_gradient,
)

from methods._case import Case
from methods.loops import (
    clipped,
    everywhere,
    mean,
    number,
    others_mean,
    row,
    score,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_ratio,
    std,
)
from proxpo import Batch


def rloo_advantages(
    b: Batch, *, kl_coef: float, low: float = -math.inf, high: float = math.inf
) -> dict[int, float]:
    shaped = []
    for i in range(len(b.mask)):
        kl = sum(number(b.old_logp[i, t]) - number(b.ref_logp[i, t]) for t in row(b, i))
        shaped.append(min(max(number(b.rewards[i]), low), high) - kl_coef * kl)
    c = b.replace(rewards=torch.tensor(shaped, dtype=torch.float64))
    return {i: shaped[i] - base for i, base in others_mean(c).items()}


def rloo_paper(b: Batch) -> torch.Tensor:
    return seq_mean_token_sum(score(everywhere(rloo_advantages(b, kl_coef=0.05), b), b), b)


def rloo_trl(b: Batch) -> torch.Tensor:
    a = rloo_advantages(b, kl_coef=0.05, low=0.1, high=0.8)
    scale = std(list(a.values())) + 1e-4
    a = {i: (x - mean(list(a.values()))) / scale for i, x in a.items()}
    rho = sequence_ratio(b, normalise=False)
    return seq_mean_token_mean(clipped(rho, everywhere(a, b), 0.2, 0.2), b)


CASES = {
    "rloo": Case("rloo", {}, rloo_paper),
    "rloo-trl": Case(
        "rloo", {"form": "trl", "normalise": True, "reward_low": 0.1, "reward_high": 0.8}, rloo_trl
    ),
}


PLAIN = {"kl_coef": 0.0}


@pytest.mark.checks("rloo", "A = G/(G-1) times the centred reward: Dr. GRPO times that factor")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_factor_to_the_centred_reward(size: int) -> None:
    batch = make_batch(1, size=size)
    close(
        advantages(method("rloo", **PLAIN), batch),
        size / (size - 1) * advantages(method("dr-grpo"), batch),
    )


@pytest.mark.checks("rloo", "advantages of a group sum to 0; shift-invariant, linear in rewards")
def test_centred_shift_invariant_linear() -> None:
    made, batch = method("rloo", **PLAIN), make_batch(1)
    a = per_row(advantages(made, batch), batch)
    close(a.view(3, 3).sum(1), torch.zeros(3))
    shift = f64([5.0, -2.0, 0.5])[batch.group].double()
    moved = batch.replace(rewards=3 * batch.rewards + shift)
    close(per_row(advantages(made, moved), batch), 3 * a)


@pytest.mark.checks("rloo", "on-policy, TRL's clipped sequence ratio has the paper's gradient")
def test_trl_form_on_policy() -> None:
    batch = on_policy(make_batch(1))
    paper, trl = method("rloo"), method("rloo", form="trl")
    expected = -advantages(paper, batch) / len(batch.mask)
    close(policy_gradient(paper, batch), expected)
    close(policy_gradient(trl, batch), expected)


@pytest.mark.checks("rloo", "a response clipped on its losing side has no gradient at all")
def test_whole_rows_are_clipped() -> None:
    ratios = [[0.1, 0.1, 0.1], [-0.1, -0.1, -0.1], [-0.1, -0.1, -0.1], [0.1, 0.1, 0.1]]
    batch = crafted(ratios, [1.0, -1.0, 1.0, -1.0])
    silent = policy_gradient(method("rloo", form="trl"), batch).eq(0).all(1)
    assert silent.tolist() == [True, True, False, False]


@pytest.mark.checks("rloo", "the same drift per token clips long responses, unlike GSPO's mean")
def test_product_is_not_length_normalised() -> None:
    drift = [[0.05] * 6, [0.05] * 6]
    mask = [[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    batch = crafted(drift, [1.0, 1.0], mask=mask)
    trl = policy_gradient(method("rloo", form="trl"), batch)
    assert trl.eq(0).all(1).tolist() == [False, True]
    normalised = method("rloo", form="trl", **{"ratio.normalise": True})
    assert policy_gradient(normalised, batch).eq(0).all(1).tolist() == [False, False]


def test_missing_rewards_leave_the_mean() -> None:
    batch = make_batch(1, groups=1, size=4)
    batch = batch.replace(rewards=f64([1.0, torch.nan, 0.5, 0.0]))
    a = per_row(advantages(method("rloo", **PLAIN), batch), batch)
    close(a, f64([0.75, 0.0, 0.0, -0.75]))


def test_group_of_one_and_equal_rewards_give_nothing() -> None:
    alone = outcome_only(make_batch(1, groups=3, size=1))
    close(advantages(method("rloo"), alone), torch.zeros_like(alone.logp))
    equal = make_batch(1)
    equal = equal.replace(rewards=torch.full_like(equal.rewards, 0.1))
    close(advantages(method("rloo", **PLAIN), equal), torch.zeros_like(equal.logp), atol=0.0)


def test_reward_bounds_come_before_the_kl() -> None:
    batch = make_batch(1)
    bounded = method("rloo", kl_coef=1.0, reward_low=0.5, reward_high=0.5)
    constant = batch.replace(rewards=torch.full_like(batch.rewards, 0.5))
    close(advantages(bounded, batch), advantages(method("rloo", kl_coef=1.0), constant))
    assert advantages(bounded, batch).abs().max() > 0.01


@pytest.mark.parametrize("bound", ["reward_low", "reward_high"])
def test_one_reward_bound_alone_acts(bound: str) -> None:
    batch = make_batch(1)
    edge = batch.rewards.clamp(min=0.5) if bound == "reward_low" else batch.rewards.clamp(max=0.5)
    found = advantages(method("rloo", **PLAIN, **{bound: 0.5}), batch)
    close(found, advantages(method("rloo", **PLAIN), batch.replace(rewards=edge)))
