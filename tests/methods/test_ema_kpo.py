import pytest
import torch
from helpers import close, crafted, f64, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    clipped,
    filtered_loss,
    filtered_ratio,
    gains_of,
    seq_mean_token_mean,
    z_scores,
)
from proxpo.stages.ratio import ema, kalman

CASES = {
    "ema-kpo": Case(
        "ema-kpo",
        {"q": 0.01, "clip_low": 0.02, "clip_high": 0.02},
        lambda b: filtered_loss(b, gains_of(b, q=0.01, p0=1.0)),
    ),
    "ema-kpo-fixed": Case(
        "ema-kpo",
        {"mode": "fixed", "alpha": 0.3, "mask_mode": "skip"},
        lambda b: seq_mean_token_mean(
            clipped(filtered_ratio(b, [0.3] * b.mask.shape[1], skip=True), z_scores(b), 3e-4, 4e-4),
            b,
        ),
    ),
}


RNG = torch.Generator().manual_seed(1)


def averaged(z: torch.Tensor, mask: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    batch = crafted(z, [1.0] * len(z), mask=mask)
    return ema(**options).apply(batch, proxpo.Context())[0].log()


def drawn(rows: int = 2, tokens: int = 40) -> torch.Tensor:
    return 0.3 * torch.randn(rows, tokens, generator=RNG, dtype=torch.float64)


def loop(z: torch.Tensor, gains: list[float]) -> torch.Tensor:
    state, out = f64(0.0), []
    for x, gain in zip(z.unbind(1), gains):
        state = (1 - gain) * state + gain * x
        out.append(state)
    return torch.stack(out, 1)


@pytest.mark.checks("ema-kpo", "P0 = 0 gives KPO's x̂; P0 = 1 the recursion to 1e-12")
def test_schedule() -> None:
    z = drawn()
    batch = crafted(z, [1.0, 1.0])
    kpo = kalman(q=1e-3, clamp=False).apply(batch, proxpo.Context())[0].log()
    close(averaged(z, q=1e-3, p0=0.0), kpo)
    gains, p = [], 1.0
    for _ in range(z.shape[1]):
        gains.append((p + 1e-3) / (p + 1e-3 + 1.0))
        p = gains[-1]
    close(averaged(z, q=1e-3), loop(z, gains), atol=1e-12)


@pytest.mark.checks("ema-kpo", "α = 1: ρ = z; α = 0: ρ = 0; z = c: |ρ| ≤ |c|, never falling")
def test_limits() -> None:
    z = drawn()
    close(averaged(z, mode="fixed", alpha=1.0), z)
    close(averaged(z, mode="fixed", alpha=0.0), 0.0 * z)
    for options in ({}, {"mode": "fixed", "alpha": 0.1}, {"q": 0.1}):
        rho = averaged(torch.full((1, 30), 0.5).double(), **options)
        assert (rho.diff() >= -1e-15).all()
        assert rho.abs().max() <= 0.5


@pytest.mark.checks("ema-kpo", "P0 = 1, Q = 0: ρ_t = Σ_{i≤t} z_i/(t+2)")
def test_running_mean() -> None:
    z = drawn()
    close(averaged(z, q=0.0), z.cumsum(1) / torch.arange(2, 42).double())


@pytest.mark.checks("ema-kpo", "padding content and, with skip, masked holes change nothing")
def test_holes() -> None:
    z = drawn(1, 6)
    mask = torch.tensor([[False, True, False, True, True, False]])
    for options in ({}, {"mode": "fixed", "alpha": 0.3}):
        found = averaged(z, mask, mask_mode="skip", **options)[mask]
        close(found, averaged(z[:, [1, 3, 4]], **options)[0])
    right = torch.tensor([[True, True, True, False, False, False]])
    spoilt = z.clone()
    spoilt[0, 3:] = 7.0
    close(averaged(z, right)[right], averaged(spoilt, right)[right])


def test_recipe_is_kpo_with_another_start() -> None:
    batch = make_batch(1, spread=0.01)
    options = {"q": 1e-3}
    kpo = policy_gradient(method("kpo", **options), batch)
    close(policy_gradient(method("ema-kpo", p0=0.0, **options), batch), kpo)
    assert not torch.allclose(policy_gradient(method("ema-kpo", **options), batch), kpo)


def test_own_token_gradient() -> None:
    z = drawn(1, 5)
    batch = crafted(z, [1.0])
    made = method("ema-kpo", mode="fixed", alpha=0.4, clipped=False)
    r = averaged(z, mode="fixed", alpha=0.4).exp()
    close(policy_gradient(made, batch), -r / 5)
