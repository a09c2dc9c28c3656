"""Score-function losses: the ratio, if any, is a weight without gradient."""

import math

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics, PerToken


@stage("trust", takes=("ratio", "no ratio"), gives="loss")
def score_function(*, cap: float = math.inf):
    """x = -sg[min(r, cap)]·A·log π; without a ratio plain REINFORCE, x = -A log π.

    cap: largest weight of a token
    """
    check_numbers("score_function", "(0, inf]", cap=cap)

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

    clip_low, clip_high: range of the weight below and above 1
    absolute: clip_high is the cap itself, not its distance from 1
    """
    floor, ceiling = max(1 - clip_low, 0.0), clip_high if absolute else 1 + clip_high
    if min(clip_low, clip_high, mask_low or 0.0, mask_high or 0.0) < 0:
        raise ProxpoError(
            "clipped_weight: clip_low, clip_high, mask_low and mask_high must not be negative, got "
            f"{clip_low}, {clip_high}, {mask_low}, {mask_high}"
        )
    if not ceiling > 0 or floor > ceiling:
        raise ProxpoError(
            f"clipped_weight: the cap must be above 0 and not below the floor, got {ceiling:g} and "
            f"{floor:g}"
        )

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        r, adv = ratio.detach(), batch.advantages
        weight = r.clamp(floor, ceiling)
        metrics = {"trust/clipped": masked_mean(weight != r, batch.mask)}
        if mask_low is not None or mask_high is not None:
            above = (adv > 0) & (r > 1 + (math.inf if mask_high is None else mask_high))
            below = (adv < 0) & (r < 1 - (math.inf if mask_low is None else mask_low))
            weight = torch.where(above | below, 0.0, weight)
            metrics["trust/silenced"] = masked_mean(above | below, batch.mask)
        return (-weight * adv) * batch.logp, metrics

    return surrogate


@stage("trust", takes=("ratio",), gives="loss")
def gamma_weight(
    *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
):
    """x = -sg[φ(r)]·A·log π, φ(r) = r^k·exp(λ(1-r)). VESPO, arXiv:2602.10693 eq. 20.

    φ(1) = 1; it falls to 0 on both sides of its peak at r = k/λ, smoothly.

    k_pos: k where A >= 0; a larger one weakens r < 1
    k_neg: k where A < 0
    lambda_pos: λ where A >= 0; a larger one weakens large r
    lambda_neg: λ where A < 0
    """
    options = {
        "k_pos": k_pos,
        "lambda_pos": lambda_pos,
        "k_neg": k_neg,
        "lambda_neg": lambda_neg,
    }
    check_numbers("gamma_weight", "[0, inf)", **options)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        adv = batch.advantages
        weight = gamma(ratio.detach(), adv, **options)
        return (-weight * adv) * batch.logp, {"trust/weight": masked_mean(weight, batch.mask)}

    return surrogate


def gamma(
    r: Float[Tensor, "seq tok"],
    adv: Float[Tensor, "seq tok"],
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> Float[Tensor, "seq tok"]:
    """φ(r) = r^k·exp(λ(1-r)), k and λ by the sign of A."""
    # A tensor among the choices: two plain numbers would be rounded to float32.
    k = torch.where(adv >= 0, r.new_full((), k_pos), k_neg)
    lam = torch.where(adv >= 0, r.new_full((), lambda_pos), lambda_neg)
    return (torch.xlogy(k, r) + lam * (1 - r)).exp()  # finite where r^k is not


@stage("trust", name="log_ratio", takes=("log_ratio",), gives="log_ratio")
def plain_log_ratio():
    """The log-ratio itself, for losses that compare whole responses."""

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        return ratio, {}

    return surrogate
