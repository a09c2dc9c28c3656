"""Importance weights between the policy that sampled and the one the ratio is taken against."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean, moments, row_mean, row_sum
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.proximal import Proximal, proximal_logp, proximal_needs
from proxpo.types import Batch, Context, PerToken

RatioLevel = Literal["token", "sequence", "geometric"]


def level_log_ratio(
    q: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], level: RatioLevel
) -> Float[Tensor, "seq tok"]:
    """The log-ratio of each token, of the response (its sum), or its mean over the response."""
    if level == "token":
        return q
    return (row_sum if level == "sequence" else row_mean)(q, mask)[:, None].expand_as(q)


@stage("weights", needs=("old_logp", "rollout_logp"))
def tis(
    *,
    mode: Literal["truncate", "mask"] = "truncate",
    level: RatioLevel = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    normalise: bool = False,
    judge: RatioLevel | None = None,
    truncate_tokens: bool = False,
):
    """w = min(exp(log π_old - log π_roll), cap), without gradient: undoes the sampler's mismatch.

    mode="truncate" holds w within [floor, cap]; "mask" keeps w where floor ≤ w ≤ cap and drops the
    token otherwise (IcePop; the denominators stay). level: per token, per response, or the
    response's geometric mean. normalise=True divides by the batch mean of w (verl). A NaN sampler
    log-probability counts as agreement, w = 1. The summed log-ratio is held within ±20.

    judge: the level whose ratio is held against the bounds, where it is not that of the weight:
    mode="mask", judge="geometric" keeps the token weights of responses whose mean is in bounds
    (OpenRLHF)
    mode: "truncate" w at the bounds, or "mask" tokens outside
    level: ratio of a token, of a whole sequence, or its geometric mean
    cap, floor: upper and lower bound of w
    normalise: divide by the batch mean of w
    truncate_tokens: bound the tokens' ratios before they are pooled (verl's GMPO)
    """
    check_numbers("tis", "(0, inf]", cap=cap)
    if not 0 <= floor <= cap or floor == math.inf:
        raise ProxpoError(f"tis: floor must be in [0, cap], got {floor} and cap {cap}")

    def weights(batch: Batch, ctx: Context) -> PerToken:
        q = torch.nan_to_num(batch.old_logp - batch.rollout_logp, nan=0.0).detach()
        if truncate_tokens:
            q = q.exp().clamp(max(floor, 1e-10), cap).log()
        raw = level_log_ratio(q, batch.mask, level).clamp(-20.0, 20.0).exp()
        apart = judge is not None and mode == "mask"
        judged = level_log_ratio(q, batch.mask, judge).exp() if apart else raw
        outside = (judged < floor) | (judged > cap)
        w = raw.clamp(floor, cap) if mode == "truncate" else torch.where(outside, 0.0, raw)
        if normalise:
            rows = batch.mask.any(dim=1, keepdim=True)
            by_token = level == "token" or (apart and judge == "token")  # else one w a response
            over, mask = (w, batch.mask) if by_token else (w[:, :1], rows[:, : w.shape[1]])
            mean, _, _ = moments(over, mask, all_sum=ctx.all_sum)
            w = torch.where(mean > 1e-8, w / mean, w)
        metrics = {
            "weights/mean": masked_mean(w, batch.mask),
            "weights/bounded": masked_mean(outside, batch.mask),
        }
        return w, metrics

    return Parts(apply=weights, idle=("judge",) if mode == "truncate" else ())


@stage("weights")
def behaviour(
    *,
    prox: Proximal = "recompute",
    mode: Literal["clamp", "mask"] = "clamp",
    level: RatioLevel = "token",
    cap: float = math.inf,
):
    """v = π_prox/π_behaviour, without gradient: decoupled PPO's second factor (arXiv:2505.24298).

    Above the cap v is held there (mode="clamp") or the token is dropped with the denominator kept
    ("mask"). level="geometric": the response's geometric mean is the common weight and criterion.

    prox: the proximal policy: recomputed, or a rule that stands for it
    mode: above the cap: "clamp" v, or "mask" the token
    level: ratio of a token, of a whole sequence, or its geometric mean
    cap: largest v
    """
    check_numbers("behaviour", "(0, inf]", cap=cap)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        q = (proximal_logp(batch, prox=prox) - batch.old_logp).detach()
        q = torch.where(q.isfinite(), q, 0.0)
        raw = level_log_ratio(q, batch.mask, level).exp()
        over = raw > cap
        v = torch.where(over, cap if mode == "clamp" else 0.0, raw)
        return v, {
            "weights/mean": masked_mean(v, batch.mask),
            "weights/bounded": masked_mean(over, batch.mask),
        }

    idle = ("mode",) if math.isinf(cap) else ()
    return Parts(apply=weights, needs=proximal_needs(prox), idle=idle)


@stage("weights", needs=("rollout_logp",))
def off_policy_mask(*, threshold: float = 0.5):
    """0 for responses with A < 0 whose mean of log π_roll - log π exceeds the threshold, else 1.

    DeepSeek-V3.2's off-policy sequence mask, arXiv:2512.02556; the denominators stay.

    threshold: largest mean log-ratio of a negative response that still counts
    """
    check_numbers("off_policy_mask", "[-inf, inf]", threshold=threshold)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        drift = row_mean(batch.rollout_logp - batch.logp.detach(), batch.mask)[:, None]
        dropped = (batch.advantages < 0) & (drift > threshold)
        return (~dropped).to(batch.logp.dtype), {
            "weights/bounded": masked_mean(dropped, batch.mask)
        }

    return weights
