"""S2PG: joint densities of action and internal state, and their gradients."""

import math

import numpy as np
import pytest
import torch

from proxpo.compose import count, policy_loss
from proxpo.control.environments import Actions
from proxpo.control.networks import RecurrentActor, gaussian_logp
from proxpo.control.stateful import (
    StateActor,
    Transitions,
    optimal_baseline,
    reinforce_gradient,
)
from proxpo.settings import make_recipe
from proxpo.types import Batch, Context, local

BOX = Actions(False, 2, -np.ones(2), np.ones(2))


def actor(state: int = 3, actions: Actions = BOX) -> RecurrentActor:
    torch.manual_seed(1)
    policy = RecurrentActor(4, actions, state=state, hidden=6).double()
    with torch.no_grad():
        policy.head.weight += torch.randn_like(policy.head.weight)
    return policy


@pytest.mark.checks(
    "stateful-policies", "log p(a, z') = log p(a) + log p(z'); dim(z) = 0: log p(a)"
)
@pytest.mark.parametrize("discrete", [True, False])
def test_joint_density(discrete: bool) -> None:
    actions = Actions(True, 3) if discrete else BOX
    policy = actor(actions=actions)
    x = torch.randn(5, 4 + policy.memory).double()
    drawn = policy.draw(x, torch.Generator().manual_seed(0))
    out, z = policy.means(x)
    std = policy.log_std.exp()
    if discrete:
        first = torch.distributions.Categorical(logits=out).log_prob(drawn[:, 0])
        spread = torch.distributions.Normal(z, std)
    else:
        first = torch.distributions.Normal(out, std[:2]).log_prob(drawn[:, :2]).sum(1)
        spread = torch.distributions.Normal(z, std[2:])
    second = spread.log_prob(drawn[:, -3:]).sum(1)
    scored = policy.score(x, drawn)
    torch.testing.assert_close(scored.logp, first + second)
    memory = policy.remember(drawn)
    assert torch.equal(memory[:, :3], drawn[:, -3:])
    assert memory.shape == (5, policy.memory)
    without = actor(0, actions)
    seen = torch.randn(5, 4 + without.memory).double()
    alone = without.draw(seen, torch.Generator().manual_seed(0))
    assert alone.shape[1] == (1 if discrete else 2)
    assert without.score(seen, alone).logp.shape == (5,)


@pytest.mark.checks("stateful-policies", "shuffling the steps leaves the loss and gradient as is")
def test_steps_can_be_shuffled() -> None:
    policy = actor()
    x = torch.randn(6, 4 + policy.memory).double()
    drawn = policy.draw(x, torch.Generator().manual_seed(0))
    old = policy.score(x, drawn).logp.detach() + 0.1 * torch.randn(6)
    fields = {"advantages": torch.randn(6, 1), "values": torch.randn(6, 1)}
    fields |= {"returns": torch.randn(6, 1), "old_values": torch.randn(6, 1)}
    recipe, results = make_recipe("stateful-policies"), []
    for order in (torch.arange(6), torch.randperm(6)):
        part = {k: v.double()[order] for k, v in fields.items()}
        logp = policy.score(x[order], drawn[order]).logp[:, None]
        batch = Batch(logp=logp, mask=torch.ones(6, 1).bool(), old_logp=old[order, None], **part)
        loss = policy_loss(recipe, batch, Context(all_sum=local, denominators=count(batch))).value
        results.append((loss.detach(), torch.autograd.grad(loss, policy.head.weight)[0]))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


# A linear policy over two steps: z1 ~ N(w s0, σ²), a1 ~ N(v z1, τ²), return -(a1 - 1)² - 0.1 z1².
SIGMA, TAU, START = 0.4, 0.3, 0.7


def returns(z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return -(a - 1).square() - 0.1 * z.square()


def exact_gradient(w: float, v: float) -> torch.Tensor:
    weights = torch.tensor([w, v], dtype=torch.float64, requires_grad=True)
    m, s2 = weights[0] * START, SIGMA**2
    mean = -((weights[1] * m - 1).square() + weights[1].square() * s2 + TAU**2) - 0.1 * (m**2 + s2)
    return torch.autograd.grad(mean, weights)[0]


def score_gradients(w: float, v: float, sigma: float, n: int) -> torch.Tensor:
    """∇ log p · return for n episodes, n x 2."""
    draws = torch.Generator().manual_seed(0)
    z = w * START + sigma * torch.randn(n, generator=draws, dtype=torch.float64)
    a = v * z + TAU * torch.randn(n, generator=draws, dtype=torch.float64)
    reward = returns(z, a)
    first = (z - w * START) / sigma**2 * START
    second = (a - v * z) / TAU**2 * z
    return torch.stack([first * reward, second * reward], dim=1)


@pytest.mark.checks(
    "stateful-policies", "horizon 2: unbiased, equal in the mean to back-propagation through time"
)
def test_unbiased_over_two_steps() -> None:
    w, v, n = 0.5, 0.8, 400_000
    expected = exact_gradient(w, v)
    draws = torch.Generator().manual_seed(4)
    weights = torch.tensor([w, v], dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, n, generator=draws, dtype=torch.float64)
    z = weights[0] * START + SIGMA * noise[0]
    through_time = torch.autograd.grad(returns(z, weights[1] * z + TAU * noise[1]).mean(), weights)[
        0
    ]
    torch.testing.assert_close(through_time, expected, atol=0.02, rtol=0)
    sampled = score_gradients(w, v, SIGMA, n)
    error = sampled.std(0) / math.sqrt(n)
    assert torch.all((sampled.mean(0) - expected).abs() < 4 * error)
    # The density that the policies use gives the same score.
    mean = torch.tensor([[w * START]], dtype=torch.float64, requires_grad=True)
    logp = gaussian_logp(torch.tensor([[0.9]]).double(), mean, torch.tensor([math.log(SIGMA)]))
    [grad] = torch.autograd.grad(logp.sum(), mean)
    assert float(grad) == pytest.approx((0.9 - w * START) / SIGMA**2)


@pytest.mark.checks("stateful-policies", "z-noise σ → 0: the estimator's variance grows as 1/σ²")
def test_variance_of_small_noise() -> None:
    wide, narrow = (score_gradients(0.5, 0.8, s, 200_000)[:, 0].var() for s in (0.02, 0.01))
    assert float(narrow / wide) == pytest.approx(4.0, rel=0.05)


@pytest.mark.checks("stateful-policies", "reinforce: the baseline is Σg²J/Σg² by weight, 0 for 0/0")
def test_component_wise_baseline() -> None:
    scores = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]).double()
    j = torch.tensor([3.0, 1.0, 2.0]).double()
    b = optimal_baseline(scores, j)
    assert b.tolist() == [pytest.approx((3 + 4 * 1 + 2) / 6), 0.0]
    expected = -sum(float(g) * (float(r) - float(b[0])) for g, r in zip(scores[:, 0], j)) / 3
    assert reinforce_gradient(scores, j).tolist() == [pytest.approx(expected), 0.0]
    same = reinforce_gradient(scores, j + 5)  # a constant in the returns changes nothing
    torch.testing.assert_close(same, reinforce_gradient(scores, j))


def test_sac_draws_have_their_densities() -> None:
    policy = StateActor(actor()).double()
    x = torch.randn(3, 4 + policy.memory).double()
    drawn = policy(x, torch.randn(3, 5).double())
    mean, z = policy.trunk.means(x)
    wide = policy.widths(x).exp()
    normal = torch.distributions.Normal(mean, wide[:, :2])
    squashed = torch.distributions.TransformedDistribution(
        normal, torch.distributions.TanhTransform()
    )
    expected = squashed.log_prob(drawn.action).sum(1)
    torch.testing.assert_close(drawn.logp_action, expected, rtol=1e-6, atol=1e-6)
    states = torch.distributions.Normal(z, wide[:, 2:]).log_prob(drawn.state).sum(1)
    torch.testing.assert_close(drawn.logp_state, states)


def test_the_replay_buffer_keeps_the_precision_of_the_network() -> None:
    """With model.dtype=float64 a buffer in float32 ended the first update in a traceback."""
    buffer, again = Transitions(3), Transitions(3)
    buffer.add(x=torch.tensor([1 / 3], dtype=torch.float64))
    again.load(buffer.state())
    for each in (buffer, again):
        assert float(each.sample(1, torch.Generator())["x"]) == 1 / 3
