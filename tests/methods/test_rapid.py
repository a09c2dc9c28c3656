import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import advantages, close, crafted, f64, make_batch, method, on_policy, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    everywhere,
    groups,
    mean,
    number,
    ratio,
    row,
    seq_mean_token_sum,
    sequence_ratio,
    std,
    weighted_score,
)
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch


def rapid(b: Batch, w: Numbers, over: Callable[[list[float]], float], *, scale: bool) -> Any:
    """w per token; a response's weight in the baseline is the mean of its tokens'."""
    r, a = b.rewards.tolist(), {}
    of_row = {i: mean([w[i, t] for t in row(b, i)]) for i in range(len(b.mask))}
    for members in groups(b).values():
        ws = [of_row[i] for i in members]
        value = sum(of_row[i] * r[i] for i in members) / over(ws)
        spread = std([r[i] for i in members]) + 1e-6 if scale else 1.0
        a |= {i: (r[i] - value) / spread for i in members}
    return a


def rapid_sequence(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 1.2) for k, v in sequence_ratio(b, normalise=False).items()}
    a = everywhere(rapid(b, w, len, scale=False), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


def rapid_token(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 1.1) for k, v in ratio(b).items()}
    a = everywhere(rapid(b, w, sum, scale=True), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


def rapid_mean(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 2.0) for k, v in sequence_ratio(b, normalise=False).items()}
    a = everywhere(rapid(b, dict.fromkeys(w, 1.0), len, scale=False), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


CASES = {
    "rapid": Case("rapid", {"cap": 1.2}, rapid_sequence),
    "rapid-token": Case(
        "rapid",
        {
            "cap": 1.1,
            "weight_level": "token",
            "self_normalised_baseline": True,
            "normalise_std": True,
        },
        rapid_token,
    ),
    "rapid-mean": Case("rapid", {"importance_weighted_baseline": False}, rapid_mean),
}


SLUG = "rapid"


def row_weights(batch: Batch, cap: float) -> torch.Tensor:
    d = torch.where(batch.mask, batch.logp - batch.old_logp, 0.0)
    return d.sum(1).exp().clamp(max=cap)


@pytest.mark.checks(SLUG, "on-policy: REINFORCE with the group-mean baseline")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1)).replace(token_rewards=None)
    close(policy_gradient(method(SLUG), batch), policy_gradient(method("reinforce"), batch))


@pytest.mark.checks(SLUG, "H = 1 on fresh data: on-policy, whatever the other switches")
@pytest.mark.parametrize(
    "options",
    [
        {"weight_level": "token"},
        {"importance_weighted_baseline": False},
        {"self_normalised_baseline": True},
    ],
)
def test_switches_agree_on_policy(options: dict) -> None:
    batch = on_policy(make_batch(1))
    mask = batch.mask & (torch.arange(9) != 4)[:, None]  # a response without tokens has w = 1 too
    for same in (batch, batch.replace(mask=mask)):
        close(policy_gradient(method(SLUG, **options), same), policy_gradient(method(SLUG), same))


@pytest.mark.checks(SLUG, "w ≤ η; every token of row k has the gradient -w_k·A_k/B")
@pytest.mark.parametrize("cap", [0.9, 1.2, 1e9])
def test_gradient_of_a_row(cap: float) -> None:
    batch, made = make_batch(1, spread=0.4), method(SLUG, cap=cap)
    w = row_weights(batch, cap)
    value = (w * batch.rewards).view(3, 3).mean(1).repeat_interleave(3)
    a = batch.rewards - value
    close(advantages(made, batch), a[:, None] * batch.mask)
    close(policy_gradient(made, batch), -(w * a)[:, None] * batch.mask / 9)


@pytest.mark.checks(SLUG, "without a cap and with a constant baseline: the exact policy gradient")
def test_unbiased_on_a_bandit() -> None:
    """Every action once, each weighed by its probability under the sampling policy."""
    logits = f64([0.3, -0.2, 1.0, 0.1]).requires_grad_()
    mu, reward = f64([0.1, 0.4, 0.2, 0.3]), f64([1.0, 0.0, 2.0, -1.0])
    batch = Batch(
        logp=logits.log_softmax(0).detach()[:, None],
        old_logp=mu.log()[:, None],
        mask=torch.ones(4, 1, dtype=torch.bool),
        advantages=reward - 0.7,
    )
    per_action = policy_gradient(method(SLUG, cap=math.inf), batch)[:, 0] * 4
    (found,) = torch.autograd.grad((mu * per_action) @ logits.log_softmax(0), logits)
    (exact,) = torch.autograd.grad(-(logits.softmax(0) @ reward), logits)
    close(found, exact)
    capped = policy_gradient(method(SLUG), batch)[:, 0] * 4
    assert not torch.allclose(capped, per_action)


@pytest.mark.checks(SLUG, "the order of responses inside a group does not matter")
def test_order_inside_a_group() -> None:
    batch, made = make_batch(1, spread=0.4), method(SLUG)
    order = torch.tensor([2, 0, 1, 5, 4, 3, 6, 8, 7])
    value = proxpo.loss_fn(made)(batch).value
    close(proxpo.loss_fn(made)(batch.rows(order)).value, value)


def test_equal_rewards_off_policy() -> None:
    """A = c(1 - mean w): what the weighted baseline leaves; the self-normalised one leaves none."""
    batch = make_batch(1, spread=0.4)
    batch = batch.replace(rewards=torch.full_like(batch.rewards, 0.5))
    mean_w = row_weights(batch, 2.0).view(3, 3).mean(1).repeat_interleave(3)
    close(advantages(method(SLUG), batch), 0.5 * (1 - mean_w)[:, None] * batch.mask)
    clean = advantages(method(SLUG, self_normalised_baseline=True), batch)
    close(clean, 0.0 * clean)


def test_a_group_of_one_teaches_nothing() -> None:
    batch = make_batch(1, groups=4, size=1, spread=0.4)
    assert advantages(method(SLUG), batch).eq(0).all()


def test_baseline_follows_the_policy() -> None:
    """A prepared batch whose policy has moved since: weights and baseline are those of now."""
    batch, made = make_batch(1, spread=0.4), method(SLUG)
    ready = proxpo.prepare(made, on_policy(batch))
    moved = ready.batch.replace(logp=ready.batch.logp + 0.2 * torch.sin(10 * batch.logp))
    found = proxpo.policy_loss(made, moved, ready.ctx).value
    afresh = batch.replace(old_logp=moved.old_logp, logp=moved.logp)
    close(found, proxpo.loss_fn(made)(afresh).value)
    stale = made.replace(advantage=None)
    assert abs(proxpo.policy_loss(stale, moved, ready.ctx).value - found) > 1e-4


def test_given_advantages_stay_as_they_are() -> None:
    batch = make_batch(1, spread=0.4).replace(advantages=torch.linspace(-1, 1, 9).double())
    w = row_weights(batch, 2.0)
    expected = -(w * batch.advantages)[:, None] * batch.mask / 9
    close(policy_gradient(method(SLUG), batch), expected)


def test_long_responses_do_not_overflow() -> None:
    batch = crafted([[40.0] * 50, [-40.0] * 50], [1.0, 1.0])
    close(policy_gradient(method(SLUG), batch), -f64([[2.0] * 50, [0.0] * 50]) / 2)


def test_other_recipes_can_have_the_baseline() -> None:
    batch = make_batch(1, spread=0.4)
    made = method("grpo", advantage="reweighted_baseline")
    close(advantages(made, batch), advantages(method(SLUG), batch))


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="cap must be positive"):
        method(SLUG, cap=cap)


@pytest.mark.checks(SLUG, "a rollout feeds H small steps; H = 1 is one step on fresh data")
@pytest.mark.parametrize("horizon", [1, 8])
def test_a_rollout_feeds_several_small_steps(horizon: int) -> None:
    made = method(SLUG, horizon=horizon)
    updates = ToyUpdates(recipe=made)
    run(made, updates)
    assert updates.calls == [("step", horizon, horizon, True)]  # each on its own share
