"""PROPS: the behaviour update by itself, and sampling error on a bandit."""

import numpy as np
import pytest
import torch

from proxpo.control.environments import Actions
from proxpo.control.networks import Actor
from proxpo.control.props import behaviour_policy, kl_divergence, props_loss

OPTIONS = {
    **{"behaviour_lr": 0.1, "behaviour_clip": 0.3, "behaviour_epochs": 4, "behaviour_parts": 4},
    **{"kl_coef": 0.0, "kl": "target_behaviour", "kl_stop": 0.03},
}


def policy(discrete: bool, size: int = 3) -> Actor:
    torch.manual_seed(2)
    box = (None, None) if discrete else (-np.ones(size), np.ones(size))
    actor = Actor(2, Actions(discrete, size, *box), hidden=5).double()
    with torch.no_grad():
        for p in actor.parameters():
            p += 0.3 * torch.randn_like(p)
    return actor


@pytest.mark.checks("props", "at φ = θ the gradient is +∇ mean log π_φ: descent lowers it")
def test_gradient_at_the_start() -> None:
    actor = policy(True)
    x, drawn = torch.randn(20, 2).double(), torch.randint(3, (20, 1)).double()
    logp = actor.score(x, drawn).logp
    weight = actor.net[0].weight
    [got] = torch.autograd.grad(
        props_loss(logp, logp.detach(), clip=0.3), weight, retain_graph=True
    )
    [expected] = torch.autograd.grad(logp.mean(), weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.checks("props", "the gradient is r where r > 1-ε, also above 1+ε, and 0 below")
def test_one_sided_clip() -> None:
    ratio = torch.tensor([0.2, 0.69, 0.71, 1.0, 1.5, 4.0]).double()
    logp = ratio.log().requires_grad_()
    [grad] = torch.autograd.grad(props_loss(logp, torch.zeros(6), clip=0.3), logp)
    expected = torch.where(ratio > 0.7, ratio, 0.0) / 6
    torch.testing.assert_close(grad, expected)
    [free] = torch.autograd.grad(props_loss(logp, torch.zeros(6), clip=None), logp)
    torch.testing.assert_close(free, ratio / 6)


@pytest.mark.parametrize("discrete", [True, False])
def test_divergences_of_both_directions(discrete: bool) -> None:
    one, other = policy(discrete), policy(discrete)
    with torch.no_grad():
        for p in other.parameters():
            p += 0.2
        if not discrete:
            other.log_std += 3  # beyond e², where the policy draws with e²
    x = torch.randn(4, 2).double()

    def known(actor: Actor):
        if discrete:
            return torch.distributions.Categorical(logits=actor.logits(x))
        width = actor.log_std.clamp(max=2).exp()
        normal = torch.distributions.Normal(actor.logits(x), width)
        return torch.distributions.Independent(normal, 1)

    for pair in ((one, other), (other, one)):
        expected = torch.distributions.kl_divergence(known(pair[0]), known(pair[1]))
        torch.testing.assert_close(kl_divergence(*pair, x), expected)


class Arms(torch.nn.Module):
    """A bandit's policy: logits alone."""

    actions = Actions(True, 5)

    def __init__(self) -> None:
        super().__init__()
        logits = torch.tensor([0.5, 0.0, -0.5, 0.2, -1.0]).double()
        self.theta = torch.nn.Parameter(logits)

    def logits(self, x):
        return self.theta.expand(len(x), 5)

    def score(self, x, drawn):
        from proxpo.control.networks import Scored

        logp = self.logits(x).log_softmax(-1)
        return Scored(logp.gather(1, drawn.long())[:, 0], None)


def sampling_error(rate: float, seeds: int = 6) -> float:
    """Mean KL(empirical‖target) after 256 draws, φ anew every 16."""
    errors = []
    for seed in range(seeds):
        draws = torch.Generator().manual_seed(seed)
        target, taken = Arms(), torch.zeros(0, 1).double()
        for _ in range(16):
            x = torch.zeros(len(taken), 1).double()
            options = {**OPTIONS, "behaviour_lr": rate, "kl_stop": 1e9}
            phi, _ = behaviour_policy(target, x, taken, options, draws)
            chances = phi.theta.detach().softmax(0)
            drawn = torch.multinomial(chances, 16, replacement=True, generator=draws)
            taken = torch.cat([taken, drawn[:, None].double()])
        share = torch.bincount(taken[:, 0].long(), minlength=5) / len(taken)
        logp = target.theta.detach().log_softmax(0)
        errors.append(float(torch.where(share > 0, share * (share.log() - logp), 0.0).sum()))
    return sum(errors) / seeds


@pytest.mark.checks("props", "on a bandit of 5 arms the sampling error falls well below i.i.d.'s")
def test_sampling_error_of_a_bandit() -> None:
    plain, corrected = sampling_error(0.0), sampling_error(0.1)
    assert 0.004 < plain < 0.016
    assert corrected < plain / 3


@pytest.mark.checks("props", "an empty buffer, a rate of 0, or δ exceeded at once: π_φ = π_θ")
@pytest.mark.parametrize("change", [{"behaviour_lr": 0.0}, {"kl_stop": -1.0}, None])
def test_on_policy_limits(change) -> None:
    target = policy(False)
    count = 8 if change is not None else 0
    x, drawn = torch.randn(count, 2).double(), torch.randn(count, 3).double()
    phi, _ = behaviour_policy(target, x, drawn, OPTIONS | (change or {}), torch.Generator())
    for p, q in zip(phi.parameters(), target.parameters()):
        assert torch.equal(p, q)


@pytest.mark.checks("props", "one unclipped epoch over the whole buffer without KL is ROS's step")
def test_ros() -> None:
    target = policy(True)
    x, drawn = torch.randn(30, 2).double(), torch.randint(3, (30, 1)).double()
    ros = {"behaviour_epochs": 1, "behaviour_parts": 1, "behaviour_clip": None}
    phi, _ = behaviour_policy(target, x, drawn, OPTIONS | ros, torch.Generator())
    target.score(x, drawn).logp.mean().backward()
    torch.optim.Adam(target.parameters(), lr=0.1).step()
    for p, q in zip(phi.parameters(), target.parameters()):
        torch.testing.assert_close(p, q)
