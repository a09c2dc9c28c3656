"""Score-function losses: the ratio, if any, is a weight without gradient."""

import math

import torch

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics, PerToken


@stage("trust", takes=("ratio", "no ratio"), gives="loss")
def score_function(*, cap: float = math.inf):
    """x = -sg[min(r, cap)]·A·log π; without a ratio plain REINFORCE, x = -A log π."""

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        weight = ratio.detach()
        metrics: Metrics = {}
        if cap < math.inf:
            metrics = {"trust/clipped": masked_mean(weight > cap, batch.mask)}
            weight = weight.clamp(max=cap)
        return (-weight * batch.advantages) * batch.logp, metrics

    return surrogate


@stage("trust", takes=("ratio",), gives="loss")
def clipped_weight(
    *,
    clip_low: float = math.inf,
    clip_high: float = 0.2,
    absolute: bool = False,
    mask_low: float | None = None,
    mask_high: float | None = None,
):
    """x = -sg[clip(r, 1-clip_low, 1+clip_high)]·A·log π: CISPO, arXiv:2506.13585 eqs 4-5.

    absolute=True: the cap is clip_high itself, not 1+clip_high (as in TRL; ScaleRL's ε_max).
    mask_low, mask_high: the unified form (eqs 6-7), which silences A > 0 with r > 1+mask_high and
    A < 0 with r < 1-mask_low.
    """
    ceiling = clip_high if absolute else 1 + clip_high

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        r, adv = ratio.detach(), batch.advantages
        weight = r.clamp(min=max(1 - clip_low, 0.0), max=ceiling)
        metrics = {"trust/clipped": masked_mean(weight != r, batch.mask)}
        if mask_low is not None or mask_high is not None:
            above = (adv > 0) & (r > 1 + (math.inf if mask_high is None else mask_high))
            below = (adv < 0) & (r < 1 - (math.inf if mask_low is None else mask_low))
            weight = torch.where(above | below, 0.0, weight)
            metrics["trust/silenced"] = masked_mean(above | below, batch.mask)
        return (-weight * adv) * batch.logp, metrics

    return surrogate


@stage("trust", name="log_ratio", takes=("log_ratio",), gives="log_ratio")
def plain_log_ratio():
    """The log-ratio itself, for losses that compare whole responses."""

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        return ratio, {}

    return surrogate
