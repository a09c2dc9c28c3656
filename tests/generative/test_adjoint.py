"""Adjoint Sampling: schedules, bridge, target, fixed point, and a run that converges."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import close

from proxpo.generative.adjoint import (
    NoiseSchedule,
    adjoint_loss,
    bridge,
    simulate,
    target,
)
from proxpo.generative.energies import Energy, gaussian, two_modes
from proxpo.train.config import load_config
from proxpo.train.loop import train

SLUG = "adjoint-sampling"
SCHEDULES = (NoiseSchedule("constant", 1e-3, 1.5), NoiseSchedule("geometric", 0.05, 1.2))
F64 = torch.float64


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=draws(seed), dtype=F64)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.noise)
def test_nu_is_the_integral_of_g(schedule: NoiseSchedule) -> None:
    t = torch.linspace(0, 0.7, 20_001, dtype=F64)
    close(torch.trapezoid(schedule.g(t).square(), t), schedule.nu(t[-1]), rtol=1e-7)
    assert schedule.nu(t[0]) == 0


@pytest.mark.checks(SLUG, "E = ‖x‖²/(2ν_1): the target is 0, so that u = 0 is optimal")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.noise)
def test_the_base_needs_no_control(schedule: NoiseSchedule) -> None:
    energy = gaussian(dim=3, mean=0.0, std=math.sqrt(schedule.nu_end))
    x = normal(9, 3)
    close(target(x, energy.gradient(x), schedule.nu_end, max_norm=50.0), 0.0 * x)


@pytest.mark.checks(SLUG, "bridge: X_t has the marginal N(0, ν_t) when X_1 ~ N(0, ν_1)")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.noise)
def test_bridge(schedule: NoiseSchedule) -> None:
    """The variances of the two independent parts of X_t add up, for every t."""
    t = torch.linspace(0.01, 1, 50, dtype=F64)
    one, none = torch.ones(50, 1, dtype=F64), torch.zeros(50, 1, dtype=F64)
    of_end = bridge(schedule, one * math.sqrt(schedule.nu_end), t, none)
    of_noise = bridge(schedule, none, t, one)
    close((of_end.square() + of_noise.square())[:, 0], schedule.nu(t))
    if schedule.noise == "constant":
        close(bridge(schedule, one, t, none)[:, 0], t)
        close(of_noise[:, 0], 1.5 * (t * (1 - t)).sqrt())


@pytest.mark.checks(SLUG, "a constant added to E changes nothing; no gradient in the end points")
def test_constants_and_gradients() -> None:
    plain = two_modes(dim=2)
    shifted = Energy(name="shifted", size=2, function=lambda x: plain.function(x) + 7.0)
    x = normal(6, 2)
    close(shifted.gradient(x), plain.gradient(x))
    end = simulate(
        lambda x, t: x, SCHEDULES[0], rows=6, size=2, steps=5, draws=draws(), dtype=F64
    ).x
    s = target(end, plain.gradient(end), SCHEDULES[0].nu_end, max_norm=50.0)
    assert not end.requires_grad
    assert not s.requires_grad


def test_the_clip_keeps_directions() -> None:
    x, slope = normal(5, 2), 100 * normal(5, 2, seed=1)
    free, held = (target(x, slope, 2.0, max_norm=c) for c in (1e9, 50.0))
    close(held.norm(dim=1), free.norm(dim=1).clamp(max=50))
    close(torch.cosine_similarity(free, held), torch.ones(5, dtype=F64))
    assert (free.norm(dim=1) > 50).any()


def optimum(schedule: NoiseSchedule, m: float, s: float):
    """The affine control score ∇ log ∫ N(x_1; x, ν_1-ν_t) N(x_1; m, s²)/N(x_1; 0, ν_1) dx_1."""
    nu, precision = schedule.nu_end, 1 / s**2 - 1 / schedule.nu_end

    def score(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        left = (nu - schedule.nu(t))[:, None]
        return (m / s**2 - precision * x) / (1 + left * precision)

    return score


@pytest.mark.checks(
    SLUG, "Gaussian target: u/g is affine, equals E[s*|X_t], and has no gradient left"
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.noise)
def test_fixed_point(schedule: NoiseSchedule) -> None:
    m, s, nu = 1.0, 0.6, schedule.nu_end
    score, energy = optimum(schedule, m, s), gaussian(dim=1, mean=m, std=s)
    # E[s* | X_t] of the joint Gaussian of X_1 ~ N(m, s²) and the bridge.
    for t in (0.2, 0.6, 0.95):
        share = float(schedule.nu(torch.tensor(t, dtype=F64))) / nu
        slope = share * s**2 / (share**2 * s**2 + nu * share * (1 - share))
        x = torch.linspace(-1, 2, 4, dtype=F64)[:, None]
        mean = m + slope * (x - share * m)
        close(score(x, torch.full((4,), t, dtype=F64)), mean / nu - (mean - m) / s**2)
    end = m + s * normal(200_000, 1)
    a, b = (torch.zeros((), dtype=F64, requires_grad=True) for _ in range(2))

    def control(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return schedule.g(t)[:, None] * (score(x, t) + a * x + b)

    goal = target(end, energy.gradient(end), nu, max_norm=50.0)
    loss = adjoint_loss(control, schedule, end, goal, draws(3))
    for slope in torch.autograd.grad(loss, [a, b]):
        assert abs(float(slope)) < 0.04  # of some 4 at u = 0
    ends = simulate(
        lambda x, t: schedule.g(t)[:, None] * score(x, t),
        schedule,
        rows=20_000,
        size=1,
        steps=50,
        draws=draws(5),
        dtype=F64,
    )
    assert float(ends.x.mean()) == pytest.approx(m, abs=0.03)
    assert float(ends.x.std()) == pytest.approx(s, abs=0.03)


@pytest.mark.long
@pytest.mark.checks(SLUG, "target N(1, 0.6²), constant g = 1.5: the sampler's mean and std")
def test_converges(tmp_path: Path) -> None:
    sets = ["noise=constant", "sigma_max=1.5", "control_lr=5e-3", "batches=40", "batch=128"]
    sets += ["buffer=6", "train.steps=18", "evaluate.every=0", "checkpoint.every=0"]
    sets += ["rollout.max_tokens=20", "evaluate.size=4000", "log.pictures=false"]
    overrides = {"out": str(tmp_path), "task": "energy:gaussian", "method": SLUG}
    summary = train(load_config(None, sets, overrides))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["proxpo/eval/mean_0"] == pytest.approx(1.0, abs=0.08)
    assert last["proxpo/eval/std_0"] == pytest.approx(0.6, abs=0.08)
    log_z = gaussian().log_z
    assert log_z - 0.1 < summary["reward_after"] < log_z + 0.02
    assert summary["reward_before"] < log_z - 0.5
