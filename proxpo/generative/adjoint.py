"""Adjoint Sampling: a control learnt by regression on the energy's gradient at the end points.

dX = g u dt + g dW, X_0 = 0;   loss = mean ‖u(X_t, t)/g - s*‖²,   s* = -∇E(X_1) + X_1/ν_1
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from proxpo.ops.shapes import Float, Tensor

Control = Callable[[Float[Tensor, "row size"], Float[Tensor, " row"]], Float[Tensor, "row size"]]


class NoiseSchedule(NamedTuple):
    """g(t), and ν_t = ∫_0^t g², of the base process dX = g dW.

    geometric: g = σ_min R^{1-t} √(2 ln R), ν_t = σ_max² (1 - R^{-2t}), R = σ_max/σ_min
    constant: g = σ_max, ν_t = σ_max² t
    """

    noise: str
    sigma_min: float
    sigma_max: float

    def g(self, t: Tensor) -> Tensor:
        if self.noise == "constant":
            return torch.full_like(t, self.sigma_max)
        r = self.sigma_max / self.sigma_min
        return self.sigma_min * r ** (1 - t) * math.sqrt(2 * math.log(r))

    def nu(self, t: Tensor) -> Tensor:
        if self.noise == "constant":
            return self.sigma_max**2 * t
        return self.sigma_max**2 * (1 - (self.sigma_max / self.sigma_min) ** (-2 * t))

    @property
    def nu_end(self) -> float:
        return float(self.nu(torch.ones((), dtype=torch.float64)))


def target(
    x: Float[Tensor, "row size"],
    gradient: Float[Tensor, "row size"],
    nu_end: float,
    *,
    max_norm: float,
) -> Float[Tensor, "row size"]:
    """s* = -∇E(X_1) + X_1/ν_1, the norm of each row at most `max_norm`."""
    s = x / nu_end - gradient
    norm = s.norm(dim=1, keepdim=True)
    return s * (max_norm / norm.clamp(min=max_norm))


def bridge(
    schedule: NoiseSchedule,
    end: Float[Tensor, "row size"],
    t: Float[Tensor, " row"],
    noise: Float[Tensor, "row size"],
) -> Float[Tensor, "row size"]:
    """X_t of the base process given X_0 = 0 and X_1: N((ν_t/ν_1) X_1, ν_t (1 - ν_t/ν_1))."""
    share = (schedule.nu(t) / schedule.nu_end)[:, None]
    variance = schedule.nu_end * share * (1 - share)
    return share * end + variance.clamp(min=0).sqrt() * noise


def adjoint_loss(
    control: Control,
    schedule: NoiseSchedule,
    end: Float[Tensor, "row size"],
    s: Float[Tensor, "row size"],
    draws: torch.Generator,
) -> Float[Tensor, ""]:
    """mean ‖u(X_t, t)/g(t) - s*‖², t uniform, X_t on the bridge to the end point."""
    t = torch.rand(len(end), generator=draws, dtype=end.dtype)
    noise = torch.randn(end.shape, generator=draws, dtype=end.dtype)
    x = bridge(schedule, end, t, noise)
    u = control(x, t) / schedule.g(t)[:, None]
    return (u - s).square().sum(dim=1).mean()


class Ends(NamedTuple):
    """End points of a simulation, and ½∫‖u‖² dt + ∫u dW along each path."""

    x: Float[Tensor, "row size"]
    cost: Float[Tensor, " row"]


@torch.no_grad()
def simulate(
    control: Control | None,
    schedule: NoiseSchedule,
    *,
    rows: int,
    size: int,
    steps: int,
    draws: torch.Generator,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Ends:
    """Euler-Maruyama from X_0 = 0; without a control the base process.

    The noise of a step is that of the base process over it, ν_{t+h} - ν_t, and the control acts
    with the mean g² of the step: exact for u/g constant over it.
    """
    x, cost = torch.zeros(rows, size, dtype=dtype), torch.zeros(rows, dtype=dtype)
    times = torch.linspace(0, 1, steps + 1, dtype=dtype)
    for index in range(steps):
        progress(index, steps)
        t, after = times[index], times[index + 1]
        variance = schedule.nu(after) - schedule.nu(t)
        noise = variance.sqrt() * torch.randn(rows, size, generator=draws, dtype=dtype)
        if control is not None:
            s = control(x, t.expand(rows)) / schedule.g(t)
            cost += variance * s.square().sum(dim=1) / 2 + (s * noise).sum(dim=1)
            x = x + variance * s
        x = x + noise
    return Ends(x, cost)


__all__ = ["Control", "Ends", "NoiseSchedule", "adjoint_loss", "bridge", "simulate", "target"]
