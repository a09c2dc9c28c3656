import pytest
import torch
from torch.testing import assert_close

from proxpo.errors import ProxpoError
from proxpo.exact import (
    ActionBatch,
    conjugate_gradient,
    fisher_exact,
    fisher_product,
    natural_gradient,
    policy_gradient,
    scores,
    trpo_step,
)
from proxpo.exact.trpo import damped, row_weights, weighted_kl


@pytest.mark.parametrize("average", ["token", "sequence"])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.checks("trpo", "an accepted step stays inside the ball and improves the surrogate")
def test_accepted_step_is_inside_and_better(policy, samples, advantages, average, offset):
    old = policy.vector()
    result = trpo_step(policy, samples, advantages + offset, average=average)
    assert result.accepted
    weights = row_weights(samples, average)
    assert torch.equal(policy.vector(), old + result.step)
    kl = float(weighted_kl(policy, samples, weights, old, policy.vector()))
    ratio = (policy.logp(policy.vector(), samples) - policy.logp(old, samples)).exp()
    before = float((weights * (advantages + offset)[:, None]).sum())
    after = float((weights * ratio * (advantages + offset)[:, None]).sum())
    assert 0.0 < kl < 0.01
    assert after > before
    assert (result.kl, result.surrogate) == (pytest.approx(kl), pytest.approx(after))
    assert result.old_surrogate == pytest.approx(before)


def test_sequences_without_tokens_have_no_weight(samples):
    weights = row_weights(samples, "sequence")
    twice = [torch.cat([x, x]) for x in (samples.inputs, samples.actions, samples.mask)]
    twice[2][len(weights) :] = False
    assert_close(row_weights(ActionBatch(*twice), "sequence")[: len(weights)], weights)


@pytest.mark.checks("trpo", "conjugate gradients equal a dense solve")
def test_cg_equals_a_dense_solve(policy, samples, advantages):
    fisher = fisher_exact(policy, samples)
    g = policy_gradient(scores(policy, samples), advantages)
    product = damped(
        fisher_product(policy, samples, row_weights(samples, "sequence"), policy.vector()), 0.1
    )
    x = conjugate_gradient(product, g, iterations=len(g), tolerance=1e-28)
    assert_close(x, natural_gradient(fisher, g, damping=0.1), rtol=1e-9, atol=1e-11)


@pytest.mark.checks("trpo", "conjugate gradients stop at the residual that was asked for")
def test_conjugate_gradients_stop_at_the_tolerance(linear):
    """At 0.99 after one product, along g; at 1e-28 and without end, at the dense solve."""
    policy, samples, advantages = linear
    g = policy_gradient(scores(policy, samples), advantages)
    exact = natural_gradient(fisher_exact(policy, samples), g, damping=0.1)
    start = policy.vector()
    for tolerance, want in ((0.99, g), (1e-28, exact)):
        policy.load(start)
        options = {"cg_iterations": len(g), "cg_tolerance": tolerance, "delta": 1e-6}
        step = trpo_step(policy, samples, advantages, average="sequence", **options).step
        assert float(torch.cosine_similarity(step, want, dim=0)) == pytest.approx(1.0, abs=1e-12)
    assert float(torch.cosine_similarity(g, exact, dim=0)) < 0.999


@pytest.mark.checks("trpo", "undamped and tiny, the step is the natural gradient on the edge")
def test_tiny_undamped_step_is_npg(linear):
    policy, samples, advantages = linear
    g = policy_gradient(scores(policy, samples), advantages)
    npg = natural_gradient(fisher_exact(policy, samples), g)
    result = trpo_step(
        policy, samples, advantages, delta=1e-8, damping=0.0, average="sequence", shrink=0.999
    )
    assert result.accepted
    assert float(torch.cosine_similarity(result.step, npg, dim=0)) > 1 - 1e-9
    assert result.kl / 1e-8 == pytest.approx(1.0, abs=5e-3)


@pytest.mark.checks("trpo", "the Fisher-vector product is symmetric and non-negative")
def test_product_is_symmetric_and_psd(policy, samples, generator):
    product = fisher_product(policy, samples, row_weights(samples), policy.vector())
    for _ in range(10):
        u, v = torch.randn(2, len(policy.vector()), generator=generator, dtype=torch.float64)
        assert float(u @ product(v)) == pytest.approx(float(v @ product(u)), rel=1e-9, abs=1e-12)
        assert float(v @ product(v)) >= 0.0


def test_product_is_the_exact_fisher_matrix(policy, samples):
    product = fisher_product(policy, samples, row_weights(samples, "sequence"), policy.vector())
    unit = torch.eye(len(policy.vector()), dtype=torch.float64)
    dense = torch.stack([product(e) for e in unit])
    assert_close(dense, fisher_exact(policy, samples), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [2.0**-20, 1e-3, 1e4])
@pytest.mark.checks("trpo", "scaling all advantages leaves the step unchanged")
def test_scale_of_the_advantages_is_invisible(policy, samples, advantages, scale):
    start = policy.vector()
    step = trpo_step(policy, samples, advantages).step
    policy.load(start)
    scaled = trpo_step(policy, samples, scale * advantages)
    assert scaled.accepted
    assert_close(scaled.step, step, rtol=1e-8, atol=1e-12)


@pytest.mark.checks("trpo", "a rejected search leaves the parameters as they were")
def test_rejected_search_changes_nothing(policy, samples, advantages):
    before = policy.vector()
    result = trpo_step(policy, samples, advantages, delta=2.0, damping=1e-3, searches=1)
    assert not result.accepted
    assert "1 trials" in result.reason
    assert torch.equal(policy.vector(), before)
    assert not result.step.any()


@pytest.mark.checks("trpo", "the KL has no slope at the old policy")
def test_kl_is_flat_at_the_old_policy(policy, samples):
    theta = policy.vector()
    slope = torch.func.grad(lambda t: weighted_kl(policy, samples, row_weights(samples), theta, t))(
        theta
    )
    assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-15)


def test_backtracking_shrinks_until_the_ball_holds(policy, samples, advantages):
    result = trpo_step(policy, samples, advantages, delta=2.0, damping=1e-3, searches=30)
    assert result.accepted
    assert result.shrinks > 0
    assert result.kl < 2.0


def test_token_advantages(policy, samples, advantages):
    start = policy.vector()
    one = trpo_step(policy, samples, advantages).step
    policy.load(start)
    # NaN where masked must not matter.
    per_token = advantages[:, None].expand(samples.mask.shape).masked_fill(~samples.mask, torch.nan)
    assert_close(trpo_step(policy, samples, per_token).step, one, rtol=0, atol=0)


def test_nothing_to_learn_is_skipped(policy, samples, advantages):
    before = policy.vector()
    flat = trpo_step(policy, samples, torch.zeros_like(advantages))
    nothing = ActionBatch(samples.inputs, samples.actions, torch.zeros_like(samples.mask))
    empty = trpo_step(policy, nothing, advantages)
    assert flat.reason == empty.reason == "zero gradient"
    assert torch.equal(policy.vector(), before)


def test_frozen_parameters_do_not_move(policy, samples, advantages):
    policy.model.embed.weight.requires_grad_(False)
    kept = policy.model.embed.weight.clone()
    assert trpo_step(policy, samples, advantages).accepted
    assert torch.equal(policy.model.embed.weight, kept)


def test_errors_say_what_was_expected(policy, samples, advantages):
    with pytest.raises(ProxpoError, match=r"expected \(7,\)"):
        trpo_step(policy, samples, advantages[:3])
    with pytest.raises(ProxpoError, match="unknown average 'tokens'; did you mean 'token'"):
        row_weights(samples, "tokens")
