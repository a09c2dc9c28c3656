"""AC-Flow: weights, advantages, the actor's loss, and exponential tilting of a Gaussian."""

import math

import pytest
import torch
from helpers import close

from proxpo.generative.flow import (
    Interpolation,
    actor_loss,
    advantages,
    interpolate,
    sample_weights,
    shaped,
)
from proxpo.generative.networks import TimeField

SLUG = "ac-flow"
F64 = torch.float64


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fields() -> tuple[TimeField, TimeField, TimeField]:
    torch.manual_seed(0)
    return (*(TimeField(2, 2, hidden=8).double() for _ in range(2)),
            TimeField(2, 1, hidden=8).double())  # fmt: skip


@pytest.mark.checks(SLUG, "τ = 0: w ≡ 1, ordinary flow matching on own samples")
@pytest.mark.parametrize("weighting", ["exp", "softmax"])
def test_no_temperature(weighting: str) -> None:
    velocity, reference, _ = fields()
    points = interpolate(torch.randn(20, 2, generator=draws(), dtype=F64), draws(1))
    w = sample_weights(torch.linspace(-3, 3, 20, dtype=F64), weighting=weighting, tau=0.0)
    close(w, torch.ones_like(w))
    loss, _ = actor_loss(velocity, reference, points, w, beta=0.0)
    close(
        loss.detach(),
        (velocity(points.x, points.t) - points.u).square().sum(1).mean().detach(),
    )


@pytest.mark.checks(SLUG, "β → ∞: v stays at v_ref")
def test_large_beta() -> None:
    _, reference, _ = fields()
    end = torch.randn(64, 2, generator=draws(), dtype=F64) + 3
    gaps = []
    for beta in (0.0, 1e6):
        velocity = fields()[1]
        optimizer = torch.optim.SGD(velocity.parameters(), lr=1e-2 / (1 + beta))
        for step in range(30):
            points = interpolate(end, draws(step))
            w = torch.ones(64, dtype=F64)
            loss, gap = actor_loss(velocity, reference, points, w, beta=beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        gaps.append(float(gap))
    assert gaps[0] > 0.1
    assert gaps[1] < 1e-9


@pytest.mark.checks(SLUG, "weights have no gradient: the actor's loss does not move the critic")
@pytest.mark.parametrize("advantage_of", ["difference", "critic", "reward"])
def test_weights_are_detached(advantage_of: str) -> None:
    velocity, reference, critic = fields()
    end = torch.randn(12, 2, generator=draws(), dtype=F64)
    points = interpolate(end, draws(1))
    values = critic(points.x, points.t)[:, 0]
    a = advantages(end[:, 0], values, advantage_of=advantage_of, bound=1.0)
    w = sample_weights(a, weighting="exp", tau=1.0)
    assert not w.requires_grad
    loss, _ = actor_loss(velocity, reference, points, w, beta=0.1)
    loss.backward()
    assert all(p.grad is None for p in [*critic.parameters(), *reference.parameters()])
    assert all(p.grad is not None for p in velocity.parameters())


@pytest.mark.checks(SLUG, "the clip a bounds w in [e^{-τa}, e^{τa}]; w increases with A")
def test_bounds_of_weights() -> None:
    rewards = torch.tensor([-50.0, -1.0, 0.0, 0.3, 80.0], dtype=F64)
    a = advantages(rewards, torch.zeros(5, dtype=F64), advantage_of="reward", bound=0.7)
    w = sample_weights(a, weighting="exp", tau=2.0)
    close(w[[0, 4]], torch.tensor([math.exp(-1.4), math.exp(1.4)], dtype=F64))
    for weighting in ("exp", "softmax", "positive"):
        w = sample_weights(a, weighting=weighting, tau=2.0)
        assert (w >= 0).all()
        assert (w.diff() >= 0).all()
    free = advantages(rewards, torch.zeros(5, dtype=F64), advantage_of="reward", bound=None)
    close(free, rewards)  # ORW-CFM-W2


@pytest.mark.checks(SLUG, "constant rewards: r̃ = 0 and w = 1, plain self-distillation")
def test_constant_rewards() -> None:
    rewards, values = torch.full((8,), 3.0, dtype=F64), torch.zeros(8, dtype=F64)
    close(shaped(rewards), 0 * rewards)
    a = advantages(rewards, values, advantage_of="difference", bound=1.0)
    close(sample_weights(a, weighting="exp", tau=1.0), torch.ones(8, dtype=F64))
    outlier = torch.zeros(1000, dtype=F64)
    outlier[0] = 1.0
    assert shaped(outlier).max() == 5


@pytest.mark.checks(SLUG, "A = r = g·x, β = 0, converged: the mean of a Gaussian moves by τΣg")
def test_exponential_tilting() -> None:
    """The best affine velocity at every t by weighted least squares, then its flow of means."""
    tau, g = 0.8, torch.tensor([1.0, -0.5], dtype=F64)
    root = torch.tensor([[0.6, 0.0], [0.3, 0.5]], dtype=F64)
    mean, steps, rows = torch.tensor([0.4, -0.2], dtype=F64), 40, 40_000
    half = torch.randn(rows // 2, 4, generator=draws(), dtype=F64)
    noise = torch.cat([half, -half])
    start, end = noise[:, :2], mean + noise[:, 2:] @ root.T
    a = advantages(end @ g, torch.zeros(rows, dtype=F64), advantage_of="reward", bound=None)
    w = sample_weights(a, weighting="exp", tau=tau)
    x = torch.zeros(2, dtype=F64)
    for index in range(steps):
        t = (index + 0.5) / steps
        inputs = torch.cat([torch.lerp(start, end, t), torch.ones(rows, 1, dtype=F64)], dim=1)
        weighted = inputs * w[:, None]
        affine = torch.linalg.solve(inputs.T @ weighted, weighted.T @ (end - start))
        # The fit is the actor's: its loss has no gradient there.
        if index == 7:
            move = affine.clone().requires_grad_()
            points = Interpolation(inputs[:, :2], torch.full((rows,), t, dtype=F64), end - start)
            field = lambda x, t: torch.cat([x, torch.ones(len(x), 1, dtype=F64)], 1) @ move  # noqa: B023, E731
            loss, _ = actor_loss(field, field, points, w, beta=0.0)
            assert torch.autograd.grad(loss, move)[0].abs().max() < 1e-9
        middle = x + (torch.cat([x, x.new_ones(1)]) @ affine) / (2 * steps)
        x = x + (torch.cat([middle, x.new_ones(1)]) @ affine) / steps
    close(x, mean + tau * root @ root.T @ g, rtol=0.0, atol=0.03)


@pytest.mark.checks(SLUG, "V exact, E[r̃|x_t]: the advantages average 0 at every x_t")
def test_exact_critic() -> None:
    """x_1 = ±1, r = x_1: at t = 0.5 the posterior of x_1 given x_t is a sigmoid."""
    half = torch.randn(100_000, generator=draws(), dtype=F64)
    start, end = torch.cat([half, -half]), torch.tensor([1.0, -1.0], dtype=F64).repeat(100_000)
    x = (start + end) / 2
    # log p(x | ±1) = -(2x ∓ 1)²/2 at t = 0.5: E[x_1 | x_t] = tanh(2x)
    values = (2 * x).tanh()
    a = advantages(end, values, advantage_of="difference", bound=None)
    for low in torch.arange(-1.5, 1.5, 0.5):
        inside = (x >= low) & (x < low + 0.5)
        assert abs(float(a[inside].mean())) < 0.03
