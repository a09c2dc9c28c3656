from typing import Any

import pytest
import torch
from helpers import close, f64, method

from methods._case import Case
from methods.loops import clipped, k3, plus, ratio, seq_mean_token_mean, z_scores
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch
from proxpo.stages.schedule.fast_slow import between, z_score


def sfpo(b: Batch, *, low: float = 0.2, high: float = 0.2, kl_coef: float = 0.0) -> Any:
    """GRPO's loss: the schedule alone makes the method."""
    x = clipped(ratio(b), z_scores(b), low, high)
    return seq_mean_token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


CASES = {
    "sfpo": Case("sfpo", {}, sfpo),
    "sfpo-kl": Case(
        "sfpo",
        {"kl_coef": 0.1, "clip_low": 0.1, "clip_high": 0.05},
        lambda b: sfpo(b, low=0.1, high=0.05, kl_coef=0.1),
    ),
}


SLUG = "sfpo"
CURVATURE = f64([0.5, 1.0, 3.0])
START = f64([1.0, -2.0, 0.5])


def quadratic(theta: torch.Tensor) -> torch.Tensor:
    return CURVATURE * theta


def after(grad=quadratic, **options) -> torch.Tensor:
    updates = ToyUpdates(grad)
    run(method(SLUG, **options), updates)
    return updates.theta


@pytest.mark.checks(SLUG, "α = 0: bit for bit one ordinary step, the fast loop is not run")
def test_no_share() -> None:
    updates = ToyUpdates(quadratic)
    run(method(SLUG, alpha=0.0), updates)
    assert torch.equal(updates.theta, START - 0.1 * quadratic(START))
    assert updates.calls == [("step", 1, 1, True)]


@pytest.mark.checks(SLUG, "α = 1 with SGD: K + 1 steps on the same batch")
def test_full_share() -> None:
    expected = START
    for _ in range(4):
        expected = expected - 0.1 * quadratic(expected)
    assert torch.equal(after(alpha=1.0), expected)


@pytest.mark.checks(SLUG, "θ' = θ₀ - η[α Σ_k ∇L(θ_k) + ∇L(θ̃)] on a quadratic")
def test_unified_formula() -> None:
    theta, total = START, torch.zeros_like(START)
    for _ in range(3):
        total = total + quadratic(theta)
        theta = theta - 0.1 * quadratic(theta)
    middle = START - 0.1 * 0.8 * total
    close(after(), START - 0.1 * (0.8 * total + quadratic(middle)))


@pytest.mark.checks(SLUG, "a linear loss moves the weights by -(αK + 1)ηg")
def test_linear_loss() -> None:
    slope = f64([1.0, 2.0, -1.0])
    close(after(lambda _: slope, fast_steps=5, alpha=0.3), START - (0.3 * 5 + 1) * 0.1 * slope)


@pytest.mark.checks(SLUG, "K = 0 is one ordinary step; θ̃ lies between θ₀ and θ_K")
def test_no_fast_steps() -> None:
    assert torch.equal(after(fast_steps=0, alpha=0.5), START - 0.1 * quadratic(START))
    [middle] = between([START], [START + 4], 0.25)
    close(middle, START + 1)


@pytest.mark.checks(SLUG, "equal entropies never switch it off; a jump does, for good if latched")
def test_trigger() -> None:
    made = method(SLUG, window=4, trigger=3.0)
    updates, state = ToyUpdates(), None

    def step(entropy: float, recipe=made) -> float:
        nonlocal state
        batch = updates.rollout
        updates.rollout = batch.replace(entropy=torch.full_like(batch.entropy, entropy))
        state, seen = run(recipe, updates, state)
        return float(seen["schedule/alpha"])

    assert [step(1.0) for _ in range(6)] == [0.8] * 6
    assert [step(x) for x in (1.1, 0.9, 1.1, 0.9)] == [0.8] * 4
    before = dict(state)
    assert step(2.0) == 0.0  # the window holds 1.1, 0.9, 1.1, 0.9: ten standard deviations
    assert [step(1.0), step(1.0)] == [0.0, 0.0]
    state = before
    loose = method(SLUG, window=4, trigger=3.0, latch=False)
    assert [step(2.0, loose), step(1.2, loose)] == [0.0, 0.8]


def test_z_score_needs_a_spread() -> None:
    assert z_score(f64(5.0), f64([])) == 0 == z_score(f64(5.0), f64([1.0, 1.0]))
    assert z_score(f64(0.1 + 0.2), f64([0.3] * 19 + [0.1 + 0.2])) == 0  # alike but for rounding
    close(z_score(f64(4.0), f64([1.0, 3.0])), 2.0)


def test_moments_may_come_back() -> None:
    for restored, left in ((False, 4), (True, 1)):
        updates = ToyUpdates(quadratic)
        run(method(SLUG, restore_optimizer=restored), updates)
        assert updates.moments == left
