"""Noise on the reward."""

import math
from collections.abc import Callable
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics


@stage("reward", needs=("rewards",))
def dither(
    *,
    scale: float | Callable[[int], float] = 0.05,
    distribution: Literal["gaussian", "uniform"] = "gaussian",
):
    """r_i -> r_i + ε_i, ε ~ N(0, scale²) or U(-scale, scale), once per rollout. arXiv:2506.18631.

    In units of the reward; the scale may be a function of the step. Drawn from the generator given
    to prepare(), which must differ between ranks (without one: torch's own). Filters and
    everything logged keep the rewards as they were. After a division by the group's std even a
    tiny noise gives a group of equal rewards advantages of full size.

    scale: size of the noise in units of the reward, or a function of the step
    distribution: "gaussian" or "uniform"
    """
    if not callable(scale) and not (isinstance(scale, float) and 0 <= scale < math.inf):
        raise ProxpoError(f"reward=dither: scale must not be negative or infinite, got {scale}")

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        size = float(scale(ctx.clock.step)) if callable(scale) else scale
        device = batch.rewards.device if ctx.generator is None else ctx.generator.device
        draw = torch.randn if distribution == "gaussian" else torch.rand
        noise = draw(
            len(batch.rewards), generator=ctx.generator, device=device, dtype=torch.float64
        )
        noise = noise if distribution == "gaussian" else 2 * noise - 1
        noise = (size * noise).to(batch.rewards)
        return batch.replace(rewards=batch.rewards + noise), {}

    return shape
