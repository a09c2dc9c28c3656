import math
from typing import Any

import pytest
import torch
from helpers import close, crafted, f64, loss_and_gradients, make_batch, method, on_policy
from helpers import policy_gradient as gradient_of

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    exp,
    full_kl,
    k3,
    log_ratio,
    number,
    plus,
    ratio,
    token_mean,
    tokens,
    unclipped,
    z_scores,
)
from proxpo import Batch
from proxpo.ops.kl import kl_exact
from proxpo.stages.regularisers.mirror import mirror_step_size
from proxpo.types import Clock


def mdpo(b: Batch, kl: Terms, *, t: float = 1.0) -> torch.Tensor:
    return token_mean(plus(unclipped(ratio(b), z_scores(b)), (1 / t, kl)), b)


def sampled_kl(b: Batch) -> Terms:
    return {k: exp(d) * d - exp(d) + 1 for k, d in log_ratio(b).items()}


def q_log(x: Any, q: float) -> Any:
    return (x ** (1 - q) - 1) / (1 - q)


def tsallis(b: Batch, q: float) -> Terms:
    return {
        k: q_log(exp(b.logp[k]), 2 - q) - q_log(math.exp(number(b.old_logp[k])), 2 - q)
        for k in tokens(b)
    }


CASES = {
    "mdpo": Case("mdpo", {}, lambda b: mdpo(b, sampled_kl(b))),
    "mdpo-k3": Case(
        "mdpo", {"kl": "k3", "step_size": 0.5}, lambda b: mdpo(b, k3(b, b.old_logp), t=0.5)
    ),
    "mdpo-exact": Case("mdpo", {"kl": "exact"}, lambda b: mdpo(b, full_kl(b, "pi_beta"))),
    "mdpo-tsallis": Case("mdpo", {"tsallis": 1.5}, lambda b: mdpo(b, tsallis(b, 1.5))),
}


SLUG = "mdpo"


@pytest.mark.checks(SLUG, "θ = θ_old: the KL has no gradient, the step is the policy gradient")
@pytest.mark.parametrize("kl", ["sampled", "k3", "exact"])
def test_first_inner_step(kl: str) -> None:
    batch = on_policy(make_batch(1))
    batch = batch.replace(old_vocab_logp=batch.vocab_logp)
    _, grads = loss_and_gradients(method(SLUG, kl=kl), batch)
    plain = method("grpo", trust="unclipped", aggregate="token_mean")
    close(grads["logp"], gradient_of(plain, batch))
    if kl == "exact":  # constant under the softmax: the sum of π (1 + 0)
        slope = (
            grads["vocab_logp"] - grads["vocab_logp"].sum(-1, keepdim=True) * batch.vocab_logp.exp()
        )
        close(slope, 0.0 * slope)


@pytest.mark.checks(SLUG, "t → ∞: the unclipped surrogate; t → 0: only the pull of the KL")
def test_limits_of_the_step_size() -> None:
    batch = make_batch(1, spread=0.6)
    plain = method("grpo", trust="unclipped", aggregate="token_mean")
    close(gradient_of(method(SLUG, step_size=1e13), batch), gradient_of(plain, batch), rtol=1e-9)
    d = batch.logp - batch.old_logp
    pull = d.exp() * d * batch.mask / batch.mask.sum()
    close(1e-9 * gradient_of(method(SLUG, step_size=1e-9), batch), pull, rtol=1e-6, atol=1e-8)


@pytest.mark.checks(SLUG, "gradient r(log r/t - A): 0 at log r = t·A, with the sign of the rest")
@pytest.mark.parametrize("t", [0.25, 1.0])
def test_zero_at_the_mirror_step(t: float) -> None:
    a = f64([[1.0, -0.5, 0.3]])
    made = method(SLUG, step_size=t)
    close(gradient_of(made, crafted(t * a, a)), 0.0 * a)
    for offset in (-0.2, 0.4):
        found = gradient_of(made, crafted(t * a + offset, a))
        close(found, (t * a + offset).exp() * offset / t / 3)
        assert (found.sign() == f64(offset).sign()).all()


@pytest.mark.checks(SLUG, "five actions, exact KL: descent ends at π ∝ π_old·exp(t·A)")
def test_bandit_reaches_the_mirror_step() -> None:
    """The sampled and the exact form, with every action in the batch in its old proportion."""
    old, a, t = f64([0.1, 0.3, 0.2, 0.25, 0.15]).log(), f64([1.0, -1.0, 0.4, 0.0, 0.6]), 0.7
    target = (old + t * a).log_softmax(0)
    logits = target.clone().requires_grad_()

    def objective(logp: torch.Tensor) -> torch.Tensor:
        return -(logp.exp() @ a) + kl_exact(logp, old) / t

    (slope,) = torch.autograd.grad(objective(logits.log_softmax(0)), logits)
    close(slope, 0.0 * slope)
    others = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).double()
    for other in others.log_softmax(1):
        assert objective(other) > objective(target)
    # The recipe's own terms, weighed by π_old, have the same slope at any point.
    point = (old + f64([0.3, -0.2, 0.1, 0.0, 0.5])).log_softmax(0)
    batch = Batch(
        logp=point[:, None], old_logp=old[:, None], mask=torch.ones(5, 1).bool(), advantages=a
    )
    per_action = 5 * gradient_of(method(SLUG, step_size=t), batch)[:, 0] * old.exp()
    leaf = point.clone().requires_grad_()
    (exact,) = torch.autograd.grad(objective(leaf), leaf)
    p = point.exp()
    close(per_action - p * per_action.sum(), exact - p * exact.sum())  # through the softmax


@pytest.mark.checks(SLUG, "r log r - r + 1 is unbiased for KL(π‖π_old) on tokens of π_old, k3 not")
def test_estimates_of_the_kl() -> None:
    new, old = f64([0.5, 0.2, 0.3]), f64([0.2, 0.5, 0.3])
    exact = (new * (new / old).log()).sum()
    batch = crafted((new / old).log()[:, None], [0.0] * 3)
    mean = {}
    for kl in ("sampled", "k3"):
        made = method(SLUG, kl=kl).regularisers[0]
        values = made.apply(torch.ones_like(batch.logp), batch, proxpo.Context())[0][:, 0]
        assert (values >= 0).all()
        mean[kl] = (old * values).sum()
    close(mean["sampled"], exact)
    assert abs(mean["k3"] - exact) > 0.01


@pytest.mark.checks(SLUG, "t_k = 1 - k/K falls to the floor; the released schedule starts above 1")
def test_annealing() -> None:
    sizes = [mirror_step_size(Clock(step=k, steps=10)) for k in range(11)]
    close(sizes[:10], [1 - k / 10 for k in range(10)])
    assert sizes[10] == 0.05
    close(mirror_step_size(Clock(step=0, steps=10), anneal="code"), 1.1)
    close(mirror_step_size(Clock(step=5, steps=10), start=0.4), 0.2)
    assert mirror_step_size(Clock(step=5, steps=10), anneal="constant") == 1.0
    assert mirror_step_size(Clock(step=5)) == 1.0  # a run of unknown length


def test_the_clock_reaches_the_loss() -> None:
    batch = make_batch(1, spread=0.4)
    late = proxpo.loss_fn(method(SLUG))(batch, proxpo.Context(clock=Clock(step=3, steps=4)))
    close(late.value, proxpo.loss_fn(method(SLUG, step_size=0.25))(batch).value)
    close(late.metrics["trust/step_size"], 0.25)


def test_tsallis_tends_to_the_plain_logarithm() -> None:
    batch = make_batch(1)
    near = method(SLUG, tsallis=1 + 1e-7).regularisers[0]
    found = near.apply(torch.ones_like(batch.logp), batch, proxpo.Context())[0]
    close(found, batch.logp - batch.old_logp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", [{"step_size": 0.0}, {"step_floor": 0.0}, {"tsallis": 1.0}])
def test_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="mirror_kl"):
        method(SLUG, **option)


def test_ten_steps_on_the_whole_rollout() -> None:
    assert method(SLUG).schedule.options == {"steps": 10, "on": "whole"}
    assert method(SLUG, updates=3).schedule.options["steps"] == 3
