"""One ratio per response, given to each of its tokens."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean, row_mean, row_sum
from proxpo.ops.shapes import Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.ratio.token import ANCHORS, Anchor, check_limit
from proxpo.types import Batch, Context, PerToken


@stage("ratio", gives="ratio")
def sequence(
    *,
    anchor: Anchor = "old",
    normalise: bool = True,
    own_gradient: bool = False,
    limit: float = 10.0,
):
    """s_i = exp((1/L_i) Σ_t (log π - log π_old)), GSPO's eq. 7; the full product if not normalised.

    own_gradient=True: each token carries the gradient of its own log-probability only,
    s_it = sg(s_i)·π/sg(π) (GSPO-token, eq. 14). The exponent is held below `limit` (verl: 10).

    anchor: policy in the denominator
    normalise: geometric mean over the tokens (true), or their product
    own_gradient: each token carries its own gradient alone
    limit: upper bound on the log-ratio
    """
    check_limit(limit, stage="sequence")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        pool = row_mean if normalise else row_sum
        exponent = pool(batch.logp - getattr(batch, ANCHORS[anchor]).detach(), batch.mask)[:, None]
        if own_gradient:
            exponent = exponent.detach() + batch.logp - batch.logp.detach()
        return exponent.clamp(max=limit).exp().expand_as(batch.logp), {}

    return Parts(apply=ratio, needs=(ANCHORS[anchor],))


@stage("ratio", needs=("old_logp",), gives="ratio")
def geometric_clip(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    per: Literal["token", "sequence", "none"] = "token",
    normalise: bool = True,
):
    """g_i = exp((1/L_i) Σ_t d'_t), d' the log-ratio clipped one-sidedly. GMPO, arXiv:2507.20673.

    d' = min(d, clip_high) if A > 0, max(d, -clip_low) if A < 0: bounds in log space. A clipped
    token still counts in g_i but gets no gradient. per="sequence" clips Σ_t d instead (ablation);
    "none" clips nothing. normalise=False leaves out 1/L_i.

    clip_low, clip_high: bounds on the log-ratio, below for A < 0 and above for A > 0
    per: clip each "token", the "sequence", or "none"
    normalise: geometric mean over the tokens (true), or their product
    """
    if clip_low < 0 or clip_high < 0:
        raise ProxpoError(
            f"geometric_clip: bounds must not be negative, got {clip_low} and {clip_high}"
        )

    def clip(d: Tensor, advantage: Tensor) -> Tensor:
        # A tensor among the choices: two plain numbers would be rounded to float32.
        free = d.new_full((), torch.inf)
        lower = torch.where(advantage >= 0, -free, -clip_low)
        upper = torch.where(advantage >= 0, clip_high, free)
        return d.clamp(lower, upper)

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        d = batch.logp - batch.old_logp.detach()
        advantage = row_mean(batch.advantages, batch.mask)[:, None]
        kept = clip(d, advantage) if per == "token" else d
        total = row_sum(kept, batch.mask)[:, None]
        if per == "sequence":
            total = clip(total, advantage)
        length = batch.mask.sum(dim=1, keepdim=True).clamp(min=1).to(d.dtype)
        exponent = total / length if normalise else total
        clipped = masked_mean(kept.detach() != d.detach(), batch.mask)
        return exponent.clamp(max=math.log(1e30)).exp().expand_as(d), {"trust/clipped": clipped}

    return Parts(apply=ratio, idle=("clip_low", "clip_high") if per == "none" else ())
