"""Group baselines weighted by the ratio of the current to the old policy."""

from typing import Literal

import torch

from proxpo.ops.groups import group_sum_over_cuts, numbered, over_std
from proxpo.ops.masked import row_mean, row_sum, spread
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken

WeightedBaseline = Literal["weighted", "self_normalised", "mean"]


def capped_weight(batch: Batch, *, cap: float, level: str) -> Float[Tensor, " seq"]:
    """min(Π_t r_t, cap) per response; level="token": the mean over tokens of min(r_t, cap).

    A response without tokens has the ratio 1.
    """
    d = (batch.logp - batch.old_logp).detach()
    if level == "token":
        mean = row_mean(d.exp().clamp(max=cap), batch.mask)
        return torch.where(batch.mask.any(dim=1), mean, min(1.0, cap))
    return row_sum(d, batch.mask).clamp(max=20.0).exp().clamp(max=cap)


@stage("advantage", needs=("rewards", "group", "old_logp"), live=True)
def reweighted_baseline(
    *,
    cap: float = 2.0,
    level: Literal["sequence", "token"] = "sequence",
    baseline: WeightedBaseline = "weighted",
    normalise_std: bool = False,
    eps: float = 1e-6,
):
    """A_k = R_k - V̂, V̂ = (1/K) Σ_j w_j R_j, w = min(π/π_old, cap) of the current policy. RAPID.

    Computed anew with every update. baseline="self_normalised": V̂ = Σ w R/Σ w; "mean": w = 1.
    normalise_std=True divides by the group's std + eps. A group of one has A = 0. Off-policy, equal
    rewards c leave A = c(1 - mean w) under "weighted". Reconstructed from the abstract and public
    reviews, arXiv:2510.03515.

    cap: largest weight of a response
    level: weight of the whole "sequence", or the mean over its tokens
    baseline: "weighted", "self_normalised" or the plain "mean"
    normalise_std: divide by the group's std
    eps: added to the std
    """
    check_numbers("reweighted_baseline", "(0, inf]", cap=cap)
    check_numbers("reweighted_baseline", "[0, inf)", eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        group = numbered(batch)
        counted = (~batch.rewards.isnan()).to(batch.logp.dtype)
        r = torch.nan_to_num(batch.rewards, nan=0.0).to(batch.logp.dtype)
        w = counted if baseline == "mean" else capped_weight(batch, cap=cap, level=level) * counted
        columns = torch.stack([counted, w, w * r, r], dim=1)
        sums = group_sum_over_cuts(columns, group, all_sum=ctx.all_sum)
        k, w_sum, weighted, plain = sums.unbind(1)
        value = weighted / (w_sum if baseline == "self_normalised" else k).clamp(min=1e-30)
        out = r - value
        if normalise_std:
            spare = counted * (r - plain / k.clamp(min=1)).square()
            squares = group_sum_over_cuts(spare[:, None], group, all_sum=ctx.all_sum)[:, 0]
            out = over_std(out, (squares / (k - 1).clamp(min=1)).sqrt() + eps)
        return spread(torch.where((counted > 0) & (k > 1), out, 0.0), batch.mask), {}

    unweighted = ("cap", "level") if baseline == "mean" else ()
    return Parts(apply=advantage, idle=unweighted + (() if normalise_std else ("eps",)))
