from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, policy_gradient
from torch import Tensor

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    bounded,
    clipped_between,
    exp,
    full_kl,
    log_ratio,
    mean,
    number,
    plus,
    ratio,
    times,
    token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.ratio import gaussian, recentred
from proxpo.types import Context


def mean_gap(b: Batch, other: Any) -> Terms:
    out = {}
    for i, t in tokens(b):
        gaps = [(b.mean[i, t, j] - number(other[i, t, j])) ** 2 for j in range(b.mean.shape[-1])]
        out[i, t] = mean(gaps) / (2 * number(b.noise[i, t]) ** 2)
    return out


def guard_ratio(b: Batch) -> Terms:
    d, gap = log_ratio(b), mean_gap(b, b.old_mean)
    return {k: exp(number(b.noise[k]) * (d[k] + gap[k])) for k in d}


def guard(b: Batch, r: Terms, clip: float, weight: Callable[[Any], float], most: float) -> Terms:
    a = {k: bounded(v, -most, most) for k, v in z_scores(b).items()}
    x = clipped_between(r, a, lambda k: (1 - clip, 1 + clip))
    return times(x, {k: weight(k) for k in x})


def guard_flow(b: Batch) -> torch.Tensor:
    return token_mean(guard(b, guard_ratio(b), 0.02, lambda k: 1 / number(b.step_size[k]), 5.0), b)


def guard_dance(b: Batch) -> torch.Tensor:
    def weight(k: Any) -> float:
        t = number(b.time[k])
        return (1 + 0.3**2 * (1 - t) / (2 * t)) / number(b.step_size[k])

    x = guard(b, guard_ratio(b), 0.05, weight, 0.8)
    return token_mean(plus(x, (0.1, mean_gap(b, b.ref_mean))), b)


def guard_tokens(b: Batch) -> torch.Tensor:
    d, kl = log_ratio(b), full_kl(b, "beta_pi")
    r = {k: exp(d[k] + kl[k]) for k in d}
    return token_mean(guard(b, r, 0.2, lambda k: 1.0, 5.0), b)


CASES = {
    "grpo-guard": Case("grpo-guard", {"clip_low": 0.02, "clip_high": 0.02}, guard_flow),
    "grpo-guard-dance": Case(
        "grpo-guard",
        {
            "noise_schedule": "dance",
            "clip_low": 0.05,
            "clip_high": 0.05,
            "advantage_bound": 0.8,
            "kl_coef": 0.1,
        },
        guard_dance,
    ),
    "grpo-guard-plain": Case(
        "grpo-guard",
        {"normalise": False, "reweight": False, "clip_low": 0.2, "clip_high": 0.2},
        lambda b: token_mean(guard(b, ratio(b), 0.2, lambda k: 1.0, 5.0), b),
    ),
    "grpo-guard-tokens": Case("grpo-guard", {"policy": "tokens"}, guard_tokens),
}


SLUG = "grpo-guard"
DIMENSIONS = 4


def log_density(x: Tensor, mean: Tensor, s: Tensor) -> Tensor:
    """Mean over the latent dimensions, up to the constant that ratios do not see."""
    return (-(x - mean).square() / (2 * s[..., None].square())).mean(-1) - s.log()


def gaussian_batch(
    *, noise: Tensor | None = None, shift: Tensor | None = None, rows: int = 6, steps: int = 3
) -> tuple[Batch, Tensor]:
    """Samples of a Gaussian policy that has moved since by `shift`; the noise that was drawn."""
    g = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    s = torch.rand(rows, steps, generator=g, dtype=torch.float64) + 0.1 if noise is None else noise
    old_mean, eps = normal(rows, steps, DIMENSIONS), normal(rows, steps, DIMENSIONS)
    move = 0.1 * normal(rows, steps, DIMENSIONS) if shift is None else shift
    mean = (old_mean + move).requires_grad_()
    x = old_mean + s[..., None] * eps
    batch = Batch(
        logp=log_density(x, mean, s),
        old_logp=log_density(x, old_mean, s),
        mask=torch.ones(rows, steps, dtype=torch.bool),
        mean=mean,
        old_mean=old_mean,
        noise=s,
        step_size=torch.full_like(s, 0.1),
        time=torch.full_like(s, 0.4),
        advantages=torch.linspace(-1, 1, rows).double(),
    )
    return batch, eps


def guarded_log_ratio(batch: Batch) -> Tensor:
    return gaussian().apply(batch, Context())[0].log()


@pytest.mark.checks(SLUG, "identity: the normalised log-ratio is mean_D(Δμ·ε)")
def test_identity() -> None:
    batch, eps = gaussian_batch()
    expected = ((batch.mean - batch.old_mean) * eps).mean(-1)
    close(guarded_log_ratio(batch).detach(), expected.detach(), rtol=0.0, atol=1e-12)


@pytest.mark.checks(
    SLUG, "over the noise its mean is 0, that of the raw log-ratio -mean(Δμ²)/(2s²)"
)
def test_mean_over_the_noise() -> None:
    """ε and -ε in equal parts: odd moments vanish exactly."""
    batch, eps = gaussian_batch()
    mirrored = []
    for sign in (1.0, -1.0):
        x = batch.old_mean + sign * batch.noise[..., None] * eps
        mirrored.append(
            batch.replace(
                logp=log_density(x, batch.mean, batch.noise),
                old_logp=log_density(x, batch.old_mean, batch.noise),
            )
        )
    normalised = sum(guarded_log_ratio(one) for one in mirrored).detach() / 2
    close(normalised, 0.0 * normalised, atol=1e-13)
    raw = sum(one.logp - one.old_logp for one in mirrored).detach() / 2
    gap = (batch.mean - batch.old_mean).square().mean(-1).detach()
    close(raw, -gap / (2 * batch.noise.square()))
    assert (raw < 0).all()


@pytest.mark.checks(SLUG, "with Δμ and ε fixed it does not depend on s")
def test_same_spread_at_every_step() -> None:
    shift = 0.1 * torch.ones(6, 3, DIMENSIONS).double()
    narrow, wide = (
        gaussian_batch(noise=torch.full((6, 3), s).double(), shift=shift)[0] for s in (0.05, 2.0)
    )
    close(guarded_log_ratio(narrow).detach(), guarded_log_ratio(wide).detach(), rtol=1e-9)
    assert not torch.allclose(narrow.logp - narrow.old_logp, wide.logp - wide.old_logp)


@pytest.mark.checks(SLUG, "its gradient by μ is ε/D, whatever Δμ")
def test_gradient_by_the_mean() -> None:
    for shift in (None, 3 * torch.ones(6, 3, DIMENSIONS).double()):
        batch, eps = gaussian_batch(shift=shift)
        (slope,) = torch.autograd.grad(guarded_log_ratio(batch).sum(), batch.mean)
        close(slope, eps / DIMENSIONS)


@pytest.mark.checks(SLUG, "the loss by μ: -A·r̂·ε/D/Δt on unclipped steps")
def test_gradient_of_the_loss() -> None:
    batch, eps = gaussian_batch()
    value = proxpo.loss_fn(method(SLUG, clip_low=5.0, clip_high=5.0))(batch).value
    (slope,) = torch.autograd.grad(value, batch.mean)
    weight = -batch.advantages[:, None] * guarded_log_ratio(batch).exp().detach() / 0.1 / 18
    close(slope, weight[..., None] * eps / DIMENSIONS)


@pytest.mark.checks(SLUG, "Δμ = 0: r̂ = 1 exactly")
def test_unmoved() -> None:
    batch, _ = gaussian_batch(shift=torch.zeros(6, 3, DIMENSIONS).double())
    assert gaussian().apply(batch, Context())[0].eq(1).all()


@pytest.mark.checks(SLUG, "both parts off: the plain ratio; s = 1 and Δμ small: nearly the same")
def test_both_parts_off() -> None:
    batch = make_batch(1, spread=0.4)
    plain = method("grpo", aggregate="token_mean")
    off = method(
        SLUG, normalise=False, reweight=False, clip_low=0.2, clip_high=0.2, advantage_bound=99.0
    )
    close(policy_gradient(off, batch), policy_gradient(plain, batch))
    unit = batch.replace(noise=torch.ones_like(batch.noise), mean=batch.old_mean)
    half = method(SLUG, reweight=False, clip_low=0.2, clip_high=0.2, advantage_bound=99.0)
    close(policy_gradient(half, unit), policy_gradient(plain, batch))


@pytest.mark.checks(SLUG, "δ = 1/Δt, or (1 + η²(1-t)/(2t))/Δt where the noise is constant")
def test_weights_of_steps() -> None:
    batch, _ = gaussian_batch()
    batch = batch.replace(mean=batch.mean.detach(), logp=batch.logp.detach())
    base = policy_gradient(method(SLUG, reweight=False), batch)
    close(policy_gradient(method(SLUG), batch), base / 0.1)
    dance = method(SLUG, noise_schedule="dance", eta=0.7)
    close(policy_gradient(dance, batch), base * (1 + 0.49 * 0.6 / 0.8) / 0.1)


def test_steps_without_noise_are_left_out() -> None:
    batch = make_batch(1)
    noise = batch.noise.clone()
    noise[:, 0] = 0.0
    ready = proxpo.prepare(method(SLUG), batch.replace(noise=noise))
    assert not ready.batch.mask[:, 0].any()
    assert ready.ctx.counts.tokens == batch.mask[:, 1:].sum()
    assert proxpo.loss_fn(method(SLUG))(batch.replace(noise=noise)).value.isfinite()


def test_advantages_are_bounded() -> None:
    batch = make_batch(1)
    free = advantages(method("grpo"), batch)
    close(advantages(method(SLUG, advantage_bound=0.5), batch), free.clamp(-0.5, 0.5))
    assert free.abs().max() > 0.5


def test_kl_to_the_reference() -> None:
    batch, _ = gaussian_batch()
    batch = batch.replace(ref_mean=batch.mean.detach() + 0.3)
    found = proxpo.loss_fn(method(SLUG, kl_coef=2.0))(batch)
    plain = proxpo.loss_fn(method(SLUG))(batch).value
    close((found.value - plain).detach(), 2.0 * (0.09 / (2 * batch.noise.square())).mean())


@pytest.mark.checks(SLUG, "tokens: log r + KL(π_old‖π) has mean 0 under the old policy")
def test_language_model_adapter() -> None:
    """Every token of a vocabulary of four as one batch, weighed by its old probability."""
    old, new = f64([0.1, 0.4, 0.3, 0.2]).log(), f64([0.3, 0.3, 0.2, 0.2]).log()
    batch = Batch(
        logp=new[:, None],
        old_logp=old[:, None],
        mask=torch.ones(4, 1).bool(),
        vocab_logp=new.expand(4, 1, 4),
        old_vocab_logp=old.expand(4, 1, 4),
    )
    moved = recentred().apply(batch, Context())[0].log()[:, 0]
    close((old.exp() * moved).sum(), 0.0)
    assert (old.exp() * (new - old)).sum() < -0.01


def test_the_adapter_is_off_and_says_what_it_needs() -> None:
    assert method(SLUG).ratio.name == "gaussian"
    made = method(SLUG, policy="tokens")
    assert made.trust.options["clip_low"] == 0.2
    assert made.filter == made.weights == ()
    anchored = method(SLUG, policy="tokens", kl_coef=0.1).regularisers
    assert [(one.name, one.options["coef"]) for one in anchored] == [("kl_to_ref", 0.1)]
    with pytest.raises(ValueError, match="'vocab_logp'"):
        proxpo.loss_fn(made)(make_batch(1).replace(vocab_logp=None))


def test_a_language_model_has_no_gaussian_mean() -> None:
    batch = make_batch(1).replace(mean=None)
    with pytest.raises(ValueError, match=r"'mean' .*Gaussian policy at each denoising step"):
        proxpo.loss_fn(method(SLUG))(batch)


def test_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bound must be positive"):
        method(SLUG, advantage_bound=0.0)
