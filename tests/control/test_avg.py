"""AVG: the arithmetic of one update, without an environment."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from proxpo.control.avg import AvgActor, AvgCritic, Drawn, TdScale, avg_losses
from proxpo.control.environments import Actions, Normaliser

ACTIONS = Actions(False, 2, np.array([-1.0, -1.0]), np.array([1.0, 1.0]))
ALPHA, GAMMA = 0.3, 0.9


def networks(*, normalise: bool = True, width: str = "covariance"):
    torch.manual_seed(0)
    actor = AvgActor(3, ACTIONS, hidden=7, normalise=normalise, width=width).double()
    critic = AvgCritic(5, hidden=7, normalise=normalise).double()
    x, after = torch.randn(2, 3, dtype=torch.float64)
    xi, xi_next = torch.randn(2, 2, dtype=torch.float64)
    return actor, critic, x, after, xi, xi_next


def losses(actor, critic, x, after, xi, xi_next, *, sigma=1.0, reward=0.7, alpha=ALPHA, done=False):
    with torch.no_grad():
        following = actor(after, xi_next)
    return avg_losses(
        critic,
        x,
        actor(x, xi),
        after,
        following,
        reward=reward,
        terminated=done,
        sigma=sigma,
        alpha=alpha,
        gamma=GAMMA,
    )


@pytest.mark.checks("avg", "the actor's gradient is α∂logπ/∂θ - (∂Q/∂a)(∂a/∂θ), ξ held")
def test_actor_gradient() -> None:
    parts = networks()
    actor = parts[0]
    _, loss = losses(*parts)
    weight = actor.mean.weight
    [grad] = torch.autograd.grad(loss, [weight])
    for place in ((0, 0), (1, 4)):
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[place] += step
                values.append(float(losses(*parts)[1]))
                weight[place] -= step
        assert float(grad[place]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


@pytest.mark.checks("avg", "σ = 1 and no feature norm: one-sample SAC, one critic, no target net")
@pytest.mark.parametrize("done", [False, True])
def test_one_sample_sac(done: bool) -> None:
    actor, critic, x, after, xi, xi_next = networks(normalise=False)

    def plain(seen, noise):
        h = seen
        for layer in actor.features.layers:
            h = nn.functional.leaky_relu(layer(h), 0.01)
        std = (0.5 * actor.log_width(h).clamp(-20, 2)).exp()
        normal = torch.distributions.Normal(actor.mean(h), std)
        squash = torch.distributions.TransformedDistribution(
            normal, torch.distributions.TanhTransform(cache_size=1)
        )
        a = (actor.mean(h) + std * noise).tanh()
        return a, squash.log_prob(a).sum()

    def q(seen, a):
        h = torch.cat([seen, a])
        for layer in critic.features.layers:
            h = nn.functional.leaky_relu(layer(h), 0.01)
        return critic.head(h)[0]

    a, logp = plain(x, xi)
    a_next, logp_next = plain(after, xi_next)
    target = 0.7 + (not done) * GAMMA * (q(after, a_next) - ALPHA * logp_next)
    expected = (target - q(x, a)).square(), ALPHA * logp - q(x, a)
    got = losses(actor, critic, x, after, xi, xi_next, done=done)
    for value, wanted in zip(got, expected):
        assert value.item() == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.checks("avg", "r, α and the critic's output times c: σ scales by c, δ stays")
def test_scale_invariance() -> None:
    actor, critic, *rest = networks()
    results = []
    for c in (1.0, 5.0):
        scaled = AvgCritic(5, hidden=7, normalise=True).double()
        scaled.load_state_dict(critic.state_dict())
        with torch.no_grad():
            scaled.head.weight *= c
            scaled.head.bias *= c
        scale, draws = TdScale(), torch.Generator().manual_seed(1)
        for t in range(40):
            value = float(torch.randn((), generator=draws))
            scale.push(c * value, GAMMA * (t % 8 != 7), terminated=t % 8 == 7)
        loss, _ = losses(actor, scaled, *rest, sigma=scale.sigma, reward=0.7 * c, alpha=ALPHA * c)
        results.append((scale.sigma / c, float(loss)))
    assert results[0] == pytest.approx(results[1], rel=1e-12)


@pytest.mark.checks("avg", "σ² = Var(r_ent) + Var(γ_t)·mean(G²); 1 until it counts; G runs on")
def test_scale_of_td_errors() -> None:
    scale = TdScale()
    assert scale.sigma == 1.0
    scale.push(0.01, 0.9, terminated=False)
    assert scale.sigma == 1.0  # below 0.01 and no episode has ended
    rewards, ends = [0.01, 1.0, -2.0, 0.5], [False, False, True, False]
    for r, end in zip(rewards[1:], ends[1:]):
        scale.push(r, 0.0 if end else 0.9, terminated=end)
    gammas = [0.9, 0.9, 0.0, 0.9]
    expected = np.var(rewards) + np.var(gammas) * sum(rewards[:3]) ** 2
    assert scale.sigma == pytest.approx(math.sqrt(expected), rel=1e-12)
    assert scale.running == 0.5  # of the episode that goes on, whatever its time limit
    other = TdScale()
    other.load(scale.state())
    assert other.sigma == scale.sigma


@pytest.mark.checks("avg", "with β1 = 0 the first step is -lr·g/(|g| + 1e-8)")
def test_first_step_is_sign_descent() -> None:
    parts = networks()
    weight = parts[0].mean.weight
    [grad] = torch.autograd.grad(losses(*parts)[1], [weight])
    before, weight.grad = weight.detach().clone(), grad
    torch.optim.Adam([weight], lr=0.01, betas=(0.0, 0.999)).step()
    expected = -0.01 * grad / (grad.abs() + 1e-8)
    torch.testing.assert_close(weight.detach() - before, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.checks("avg", "features have norm 1, so |Q| ≤ ‖w‖ + |b|; std = exp(ℓ/2) as released")
def test_features_and_width() -> None:
    actor, critic, x, _, xi, _ = networks()
    for rows in (torch.randn(50, 5, dtype=torch.float64) * 100, torch.zeros(1, 5).double()):
        features = critic.features(rows)
        assert torch.all((features.norm(dim=-1) - 1).abs() < 1e-12) or not rows.any()
        bound = critic.head.weight.norm() + critic.head.bias.abs()
        assert torch.all(critic(rows[:, :3], rows[:, 3:]).abs() <= bound + 1e-12)
    wide = networks(width="std")[0]
    wide.load_state_dict(actor.state_dict())
    zero = torch.zeros_like(xi)
    spread = [(a(x, xi).action.atanh() - a(x, zero).action.atanh()) / xi for a in (actor, wide)]
    torch.testing.assert_close(spread[0], spread[1].sqrt(), rtol=1e-9, atol=0)
    assert isinstance(actor(x, xi), Drawn)


def test_running_moments_are_those_of_all_rows() -> None:
    rows = torch.randn(37, 3, dtype=torch.float64) * 5 + 2
    normaliser = Normaliser(3)
    for part in rows.split([1, 20, 16]):
        normaliser.update(part)
    variance = rows.var(0, correction=0)
    expected = ((rows - rows.mean(0)) / (variance + 1e-8).sqrt()).clamp(-10, 10)
    torch.testing.assert_close(normaliser(rows), expected)
