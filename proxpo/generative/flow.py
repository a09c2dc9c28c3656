"""AC-Flow: flow matching on own samples, weighted by a critic of intermediate points.

x_t = (1-t) x_0 + t x_1,   L = mean w ‖v(x_t, t) - (x_1 - x_0)‖² + β mean ‖v - v_ref‖²
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from proxpo.ops.shapes import Float, Tensor

Velocity = Callable[[Float[Tensor, "row size"], Float[Tensor, " row"]], Float[Tensor, "row size"]]
SHAPED = 5.0  # largest shaped reward


class Interpolation(NamedTuple):
    """Points between noise and samples: x_t, t and the velocity u = x_1 - x_0."""

    x: Float[Tensor, "row size"]
    t: Float[Tensor, " row"]
    u: Float[Tensor, "row size"]


def interpolate(end: Float[Tensor, "row size"], draws: torch.Generator) -> Interpolation:
    """x_t on the straight line from fresh noise to each sample, t uniform."""
    start = torch.randn(end.shape, generator=draws, dtype=end.dtype)
    t = torch.rand(len(end), generator=draws, dtype=end.dtype)
    return Interpolation(torch.lerp(start, end, t[:, None]), t, end - start)


def shaped(rewards: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """r̃ = clip((r - mean)/(std + 1e-6), ±5); 0 where all rewards are equal."""
    centred = rewards - rewards.mean()
    return (centred / (rewards.std(correction=0) + 1e-6)).clamp(-SHAPED, SHAPED)


def advantages(
    rewards: Float[Tensor, " row"],
    values: Float[Tensor, " row"],
    *,
    advantage_of: str,
    bound: float | None,
) -> Float[Tensor, " row"]:
    """A of every point, without gradient: r̃ - V, V less its mean, or r; held within ±bound."""
    values = values.detach()
    a = {
        "difference": lambda: shaped(rewards) - values,
        "critic": lambda: values - values.mean(),
        "reward": lambda: rewards,
    }[advantage_of]()
    return a if bound is None else a.clamp(-bound, bound)


def sample_weights(
    a: Float[Tensor, " row"], *, weighting: str, tau: float
) -> Float[Tensor, " row"]:
    """w ≥ 0, increasing in A: exp(τA), N softmax(τA), or 1{A > 0}."""
    if weighting == "exp":
        return (tau * a).exp()
    return len(a) * (tau * a).softmax(0) if weighting == "softmax" else (a > 0).to(a.dtype)


def actor_loss(
    velocity: Velocity,
    reference: Velocity,
    points: Interpolation,
    weights: Float[Tensor, " row"],
    *,
    beta: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """mean w‖v - u‖² + β mean‖v - v_ref‖², and mean‖v - v_ref‖² alone."""
    v = velocity(points.x, points.t)
    with torch.no_grad():
        v_ref = reference(points.x, points.t)
    gap = (v - v_ref).square().sum(dim=1).mean()
    fit = (weights * (v - points.u).square().sum(dim=1)).mean()
    return fit + beta * gap, gap.detach()


@torch.no_grad()
def draw(
    velocity: Velocity,
    *,
    rows: int,
    size: int,
    steps: int,
    draws: torch.Generator,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[Tensor, "row size"]:
    """Samples of the flow: dx = v(x, t) dt from noise at t = 0, in Euler steps."""
    x = torch.randn(rows, size, generator=draws, dtype=dtype)
    for index in range(steps):
        progress(index, steps)
        x = x + velocity(x, x.new_full((rows,), index / steps)) / steps
    return x


__all__ = [
    "Interpolation",
    "Velocity",
    "actor_loss",
    "advantages",
    "draw",
    "interpolate",
    "sample_weights",
    "shaped",
]
