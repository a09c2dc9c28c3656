import pytest
import torch
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.exact import (
    fisher_sequence,
    minsr,
    minsr_damping,
    minsr_weights,
    natural_gradient,
    policy_gradient,
    scores,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture
def j(policy, samples):
    return scores(policy, samples)


@pytest.mark.parametrize("damping", [0.0, 1e-4, 1e-1])
@pytest.mark.checks("minsr", "equals the damped solve over parameters")
def test_equals_the_parameter_space_solve(j, advantages, damping):
    x = (j - j.mean(0)) / 7**0.5
    f = (advantages - advantages.mean()) / 7**0.5
    direct = natural_gradient(x.T @ x, x.T @ f, damping=damping)
    assert_close(minsr(j, advantages, damping=damping), direct, **EXACT)


@pytest.mark.parametrize("damping", [0.0, 1e-4, 1e-1])
@pytest.mark.checks("minsr", "un-centred it is the natural gradient of the sampled Fisher matrix")
def test_uncentred_is_npg(j, advantages, damping):
    npg = natural_gradient(fisher_sequence(j), policy_gradient(j, advantages), damping=damping)
    assert_close(minsr(j, advantages, damping=damping, centred=False), npg, **EXACT)


@pytest.mark.checks("minsr", "strong damping gives the centred plain gradient")
def test_strong_damping_is_the_centred_gradient(j, advantages):
    centred = (j - j.mean(0)).T @ (advantages - advantages.mean()) / 7
    assert_close(1e9 * minsr(j, advantages, damping=1e9), centred, rtol=1e-7, atol=1e-9)


@pytest.mark.checks("minsr", "a constant on all advantages or one vector on all rows is invisible")
def test_centring_ignores_constants(j, advantages, generator):
    u = minsr(j, advantages, damping=0.01)
    shift = torch.randn(j.shape[1], generator=generator, dtype=j.dtype)
    assert_close(minsr(j, advantages + 3.0, damping=0.01), u, **EXACT)
    assert_close(minsr(j + shift, advantages, damping=0.01), u, **EXACT)
    assert not torch.allclose(
        minsr(j, advantages + 3.0, damping=0.01, centred=False),
        minsr(j, advantages, damping=0.01, centred=False),
    )


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.checks("minsr", "a second backward with the weights as advantages gives the step")
def test_two_passes_store_no_scores(policy, samples, j, advantages, centred):
    kernel = sum(
        part.flatten(1) @ part.flatten(1).T
        for part in j.split([p.numel() for p in policy.parameters.values()], dim=1)
    )
    weights = minsr_weights(kernel, advantages, damping=0.01, centred=centred)
    logits = policy.model(samples.inputs).log_softmax(-1)
    logp = logits.gather(-1, samples.actions[..., None])[..., 0] * samples.mask
    grads = torch.autograd.grad(weights @ logp.sum(1), list(policy.parameters.values()))
    u = torch.cat([g.flatten() for g in grads])
    assert_close(u, minsr(j, advantages, damping=0.01, centred=centred), **EXACT)


@pytest.mark.checks("minsr", "orthogonal scores do not interact")
def test_orthogonal_scores_do_not_interact(advantages, generator):
    q, _ = torch.linalg.qr(torch.randn(20, 7, generator=generator, dtype=torch.float64))
    rows = q.T * torch.arange(1, 8)[:, None]
    u = minsr(rows, advantages, damping=0.3, centred=False)
    apart = advantages / (rows.square().sum(1) + 7 * 0.3)
    assert_close(u, apart @ rows, **EXACT)


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_spring_is_ridge_towards_the_carried_update(j, advantages, generator, mu):
    """u minimises |X u - f|² + λ|u - μ u₋|²."""
    previous = torch.randn(j.shape[1], generator=generator, dtype=j.dtype)
    x = (j - j.mean(0)) / 7**0.5
    f = (advantages - advantages.mean()) / 7**0.5
    u = minsr(j, advantages, damping=0.05, momentum=mu, previous=previous)
    slope = x.T @ (x @ u - f) + 0.05 * (u - mu * previous)
    assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-10)


def test_projection_leaves_the_centred_step_alone(j, advantages):
    """11ᵀ acts on the null vector of the centred kernel only."""
    u = minsr(j, advantages, damping=0.01)
    assert_close(minsr(j, advantages, damping=0.01, projection=2.0), u, **EXACT)


def test_one_sample_or_equal_advantages_give_no_step(j, advantages):
    assert minsr(j[:1], advantages[:1], damping=0.1).abs().max() == 0
    assert minsr(j, torch.full_like(advantages, 2.0), damping=0.1).abs().max() < 1e-14


def test_duplicates_are_handled_by_the_damping(j, advantages):
    u = minsr(j[[0, 1, 1, 2]], advantages[[0, 1, 1, 2]], damping=1e-3)
    assert torch.isfinite(u).all()
    assert u.any()


def test_suggested_damping_is_the_ntk_shift(j):
    kernel = j @ j.T
    c = 0.5 * kernel.trace() / 7
    assert 7 * minsr_damping(kernel, rho=0.5) == pytest.approx(float(c))


def test_momentum_needs_the_previous_update(j, advantages):
    with pytest.raises(ProxpoError, match="previous"):
        minsr(j, advantages, damping=0.1, momentum=0.9)
