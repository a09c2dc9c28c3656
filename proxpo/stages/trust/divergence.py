"""A trust region of probabilities instead of ratios."""

import math
from typing import Literal

import torch

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken

THRESHOLDS = {"tv": 0.15, "kl": 0.05}


@stage("trust", takes=("ratio",), gives="loss")
def divergence_mask(
    *,
    divergence: Literal["tv", "kl"] = "tv",
    clip_low: float | None = None,
    clip_high: float | None = None,
    weight_cap: float = math.inf,
    eps: float = 1e-8,
):
    """x = -M·sg[min(r, weight_cap)]·A·log π. DPPO, arXiv:2602.04879 eqs 12-14.

    M = 0 where a step would lead further away from a policy that is too far: A > 0, r > 1 and
    D > clip_high, or A < 0, r < 1 and D > clip_low; else 1. D compares the sampled token's
    probabilities: π under the policy, μ = π/r under the one in the ratio's denominator.

    divergence: "tv", D = |μ - π|; or "kl", that of two coins with μ and π
    clip_low: largest D where A < 0; none: 0.15 of tv, 0.05 of kl
    clip_high: largest D where A > 0; none: 0.15 of tv, 0.05 of kl
    weight_cap: largest weight of a token
    eps: added to 1 - μ and 1 - π under the logarithm of "kl", as in verl
    """
    low = THRESHOLDS[divergence] if clip_low is None else clip_low
    high = THRESHOLDS[divergence] if clip_high is None else clip_high
    check_numbers("divergence_mask", "[0, inf]", clip_low=low, clip_high=high)
    check_numbers("divergence_mask", "(0, inf]", weight_cap=weight_cap)
    check_numbers("divergence_mask", "[0, inf)", eps=eps)

    def distance(ratio: Float[Tensor, "seq tok"], logp: Float[Tensor, "seq tok"]) -> Tensor:
        pi, mu = logp.exp(), (logp - ratio.log()).exp()
        if divergence == "tv":
            return (mu - pi).abs()
        pi, mu = pi.clamp(max=1.0), mu.clamp(max=1.0)  # rounding may have put them above
        return (1 - mu) * ((1 - mu + eps) / (1 - pi + eps)).log() - torch.xlogy(mu, ratio)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        r, adv = ratio.detach(), batch.advantages
        d = distance(r, batch.logp.detach())
        outside = ((adv > 0) & (r > 1) & (d > high)) | ((adv < 0) & (r < 1) & (d > low))
        weight = torch.where(outside, 0.0, r.clamp(max=weight_cap))
        return (-weight * adv) * batch.logp, {"trust/clipped": masked_mean(outside, batch.mask)}

    return Parts(apply=surrogate, idle=("eps",) if divergence == "tv" else ())


__all__ = ["divergence_mask"]
