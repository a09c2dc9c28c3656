import math
from typing import Any

import pytest
import torch
from helpers import close, crafted, f64, gradients, make_batch, method, on_policy, with_leaves

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    bounded,
    clipped,
    exp,
    number,
    plus,
    token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch, ProxpoError
from proxpo.stages.prompts import within_reach
from proxpo.stages.ratio.latent import thought_logp
from proxpo.types import Context

SLUG = "vlpo"


def logp_of(b: Batch, mean: Any, token: Any, sigma: float) -> Terms:
    """Tokens as they are, thoughts by their distance to the mean."""
    out: Terms = {}
    for i, t in tokens(b):
        gap = (number(z) - m for z, m in zip(b.thought[i, t], mean[i, t]))
        out[i, t] = -sum(d**2 for d in gap) / (2 * sigma**2) if b.latent[i, t] else token[i, t]
    return out


def constants(x: Terms) -> Terms:
    return {k: number(v) for k, v in x.items()}


def vlpo(b: Batch, *, sigma: float = 10.0, high: float = 0.3, dual: float = 3.0, kl: float = 0.01):
    now = logp_of(b, b.mean, b.logp, sigma)
    old = constants(logp_of(b, b.old_mean, b.old_logp, sigma))
    ref = constants(logp_of(b, b.ref_mean, b.ref_logp, sigma))
    r = {k: exp(bounded(now[k] - old[k], -10, 10)) for k in now}
    x = clipped(r, z_scores(b), 0.2, high, dual=dual)
    if kl:
        e = {k: ref[k] - now[k] for k in now}
        held = {k: bounded(v, -10, 10) for k, v in e.items()}
        x = plus(x, (kl, {k: exp(v) - 1 - v for k, v in held.items()}))
    return token_mean(x, b)


CASES = {
    SLUG: Case(SLUG, {}, vlpo),
    "vlpo-narrow": Case(
        SLUG,
        {"sigma": 0.3, "noise": 1.0, "kl_coef": 0.0, "clip_high": 0.1, "dual": 1.2},
        lambda b: vlpo(b, sigma=0.3, high=0.1, dual=1.2, kl=0.0),
    ),
    "vlpo-ablated": Case(
        SLUG, {"ablate_latent": True}, lambda b: vlpo(b.replace(mask=b.mask & ~b.latent))
    ),
}


def thinking(
    z: list[float], mean: list[float], adv: float, *, old: list[float] | None = None
) -> Batch:
    """One row of a latent thought and a token, on-policy but for the thought's mean."""
    width = len(z)
    rest = [0.0] * width
    old = z if old is None else old
    batch = crafted([[0.0, 0.0]], [[adv, adv]])
    return batch.replace(
        latent=torch.tensor([[True, False]]),
        thought=f64([[z, rest]]),
        mean=f64([[mean, rest]]),
        old_mean=f64([[old, rest]]),
        ref_mean=f64([[old, rest]]),
        ref_logp=batch.logp,
        group=torch.zeros(1, dtype=torch.long),
        rewards=f64([1.0]),
    )


def mean_gradient(batch: Batch, **options: Any) -> torch.Tensor:
    leaves = with_leaves(batch)
    value = proxpo.loss_fn(method(SLUG, easiest=None, kl_coef=0.0, **options))(leaves).value
    return gradients(value, leaves)["mean"][0, 0]


@pytest.mark.checks(SLUG, "no latent positions: GRPO with dual clip")
def test_without_thoughts_it_is_grpo() -> None:
    batch = make_batch(3, spread=0.6)
    batch = batch.replace(latent=torch.zeros_like(batch.latent))
    plain = method("grpo", clip_high=0.3, dual=3.0, **{"aggregate": "token_mean"})
    found = proxpo.loss_fn(method(SLUG, kl_coef=0.0, easiest=None))(batch).value
    close(found, proxpo.loss_fn(plain)(batch).value)


@pytest.mark.checks(SLUG, "∂log π/∂μ = (z - μ)/σ², zero at μ = z; ratios at most 1 when z = μ_old")
def test_density() -> None:
    batch = make_batch(2)
    mean = batch.mean.detach().clone().requires_grad_()
    slope = torch.autograd.grad(thought_logp(batch.thought, mean, 0.7).sum(), mean)[0]
    close(slope, (batch.thought - mean.detach()) / 0.49)
    made = method(SLUG, sigma=0.5, easiest=None)
    own = batch.replace(thought=batch.old_mean)
    r = made.ratio.apply(own, Context())[0]
    assert bool((r[batch.latent] <= 1).all())
    fresh = on_policy(own).replace(mean=own.old_mean)
    close(made.ratio.apply(fresh, Context())[0], 1.0)
    close(mean_gradient(thinking([1.0, 2.0], [1.0, 2.0], 1.0), sigma=0.5), 0.0)


@pytest.mark.checks(SLUG, "A > 0 moves μ towards z; A < 0 away until the ratio is below 1 - ε")
def test_direction() -> None:
    z, mean = [1.0, 2.0], [1.1, 1.9]
    towards = f64(z) - f64(mean)
    for adv in (1.0, -1.0):
        step = -mean_gradient(thinking(z, mean, adv), sigma=0.5)
        close(step / step.norm(), adv * towards / towards.norm())
    close(mean_gradient(thinking(z, [2.0, 2.0], -1.0), sigma=0.5), 0.0)  # ratio e^-2
    assert mean_gradient(thinking(z, [2.0, 2.0], 1.0), sigma=0.5).abs().max() > 0.1


@pytest.mark.checks(
    SLUG, "σ → ∞: ratios 1, no gradient; (z, μ, σ) scaled together: nothing changes"
)
def test_scale() -> None:
    wide = thinking([1.0, 2.0], [1.3, 1.6], 1.0)
    assert mean_gradient(wide, sigma=1e6).abs().max() < 1e-11
    c = 7.0
    scaled = wide.replace(**{n: c * getattr(wide, n) for n in ("thought", "mean", "old_mean")})
    close(c * mean_gradient(scaled, sigma=0.5 * c), mean_gradient(wide, sigma=0.5))


@pytest.mark.checks(SLUG, "latent positions count in the denominator of the token mean")
def test_thoughts_count_as_tokens() -> None:
    batch = thinking([1.0], [1.0], 1.0)
    found = proxpo.loss_fn(method(SLUG, easiest=None, kl_coef=0.0))(batch)
    close(found.value, -1.0)
    shorter = batch.replace(mask=torch.tensor([[False, True]]))
    leaves = [with_leaves(b) for b in (batch, shorter)]
    slopes = [
        gradients(proxpo.loss_fn(method(SLUG, easiest=None, kl_coef=0.0))(b).value, b)["logp"][0, 1]
        for b in leaves
    ]
    close(slopes[0] * 2, slopes[1])


@pytest.mark.checks(SLUG, "only prompts with a pass rate in (0, 0.6] are trained on")
def test_window() -> None:
    batch = make_batch(1, groups=4, size=5)
    right = torch.zeros(20)
    for group, solved in enumerate((0, 1, 3, 4)):
        right[5 * group : 5 * group + solved] = 1
    batch = batch.replace(correct=right.bool(), rewards=right.double())
    [window] = method(SLUG).prompts
    kept = window.apply(batch, Context())[0]
    assert kept.view(4, 5)[:, 0].tolist() == [False, True, True, False]
    assert window == within_reach(low=1e-6, high=0.6, min_responses=2)


def test_refused() -> None:
    for option, line in (
        ("sigma", "sigma must be at least"),
        ("noise", "noise must not be negative"),
    ):
        with pytest.raises(ProxpoError, match=line):
            method(SLUG, **{option: -1.0})
    assert math.isfinite(float(proxpo.loss_fn(method(SLUG, easiest=None))(make_batch(1)).value))
