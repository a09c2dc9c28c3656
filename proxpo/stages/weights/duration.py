"""Weights by the running time of an action."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import spread
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


@stage("weights", needs=("duration",))
def by_duration(*, max_weight: float | None = None, min_duration: float = 0.0):
    """w_i = Δt_i / mean(Δt), the mean over the step's responses with tokens. arXiv:2509.01684.

    Where actions are collected asynchronously, one that runs for Δt is sampled about π/Δt times;
    the weight undoes that. Durations are raised to `min_duration` first, weights held below
    `max_weight` last. A mean of 0 leaves every weight 1. Data that was collected in lockstep has no
    such bias: there the weight favours slow actions.

    max_weight: largest weight; none: unbounded
    min_duration: shorter durations count as this one
    """
    check_numbers("by_duration", "(0, inf]", max_weight=max_weight)
    check_numbers("by_duration", "[0, inf)", min_duration=min_duration)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        filled = batch.mask.any(dim=1)
        wrong = filled & ~(batch.duration.isfinite() & (batch.duration >= 0))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ProxpoError(
                f"weights=by_duration: response {row} has the duration "
                f"{float(batch.duration[row])}, expected seconds, 0 or more"
            )
        seconds = torch.where(filled, batch.duration.clamp(min=min_duration), 0.0).double()
        total, n = ctx.all_sum(torch.stack([seconds.sum(), filled.sum().double()]))
        mean = total / n.clamp(min=1)
        weight = torch.where(mean > 0, seconds / torch.where(mean > 0, mean, 1.0), 1.0)
        weight = weight if max_weight is None else weight.clamp(max=max_weight)
        return spread(weight.to(batch.logp.dtype), batch.mask), {"weights/duration": mean}

    return weights
