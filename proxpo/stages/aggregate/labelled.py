"""Whole responses as examples of a classifier: their scores come from log-ratios."""

from typing import Literal, NamedTuple

import torch

from proxpo.ops.groups import group_sum_over_cuts
from proxpo.ops.masked import row_mean, row_sum
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import AllSum, Batch, Context, Metrics

Score = Literal["leave_one_out", "standardised", "centred", "plain"]
PerResponse = Float[Tensor, " seq"]
LABELLED = "aggregate=labelled_scores"


class Members(NamedTuple):
    """Responses in a cut's group statistics: 1 for each that counts, and the group's size n."""

    counted: PerResponse
    n: PerResponse
    group: Tensor
    all_sum: AllSum

    def sums(self, *columns: PerResponse) -> tuple[Tensor, ...]:
        stacked = torch.stack([column * self.counted for column in columns], dim=1)
        return group_sum_over_cuts(stacked, self.group, all_sum=self.all_sum).unbind(1)


def group_scores(
    r: PerResponse, at: Members, score: Score, eps: float
) -> tuple[PerResponse, PerResponse]:
    """ψ from the proxies r̂ of a group, and the divisor it was made with."""
    unit = torch.ones_like(r)
    if score == "plain":
        return r, unit
    (total,) = at.sums(r)
    if score == "leave_one_out":
        return r - (total - r) / (at.n - 1).clamp(min=1), unit
    u = r - total / at.n.clamp(min=1)
    if score == "centred":
        return u, unit
    (squares,) = at.sums(u.square())
    s = (squares / (at.n - 1).clamp(min=1)).sqrt() + eps
    return u / s, s


def pulled_back(
    e: PerResponse, psi: PerResponse, s: PerResponse, at: Members, score: Score, eps: float
) -> PerResponse:
    """Σ_i e_i ∂ψ_i/∂r̂_k for each k: the gradient flows through the statistics too."""
    if score == "plain":
        return e
    total, along = at.sums(e, e * psi)
    if score == "leave_one_out":
        return e - (total - e) / (at.n - 1).clamp(min=1)
    centred = e - total / at.n.clamp(min=1)
    if score == "centred":
        return centred
    std = s - eps
    bend = torch.where(std > 0, psi * along / ((at.n - 1).clamp(min=1) * std), 0.0)
    return centred / s - bend


@stage("aggregate", takes=("log_ratio",), needs=("rewards", "group"), adds=("score/agrees",))
def labelled_scores(
    *,
    beta: float = 1.0,
    score: Score = "leave_one_out",
    per: Literal["sum", "mean"] = "sum",
    eps: float = 1e-6,
):
    """(1/B⁺) Σ_i |A_i|·softplus(-sign(A_i)·ψ_i): binary cross-entropy, |A| the class weight.

        r̂_i = β Σ_t log-ratio (per="mean": its mean),   ψ_i = r̂_i - mean of the others' r̂
        score="standardised": (r̂_i - mean)/(std + eps);  "centred": r̂_i - mean;  "plain": r̂_i

    Nothing is detached. Responses without a reward are no part of their group; empty ones have
    r̂ = 0 there and no term of their own. Groups may be cut over micro-batches: the sums run over
    all of them, and each term carries the gradient of the whole loss to its own response.

    beta: β, the scale of the score
    score: comparison within the group: "leave_one_out", "standardised", "centred", "plain"
    per: "sum" or "mean" of the log-ratios of a response
    eps: added to the std of score="standardised"
    """
    check_numbers("labelled_scores", "(0, inf)", beta=beta)
    check_numbers("labelled_scores", "(0, inf)", eps=eps)

    def prepare(batch: Batch) -> dict[str, Tensor]:
        """Groups numbered from 0."""
        return {"group": batch.require("group", by=LABELLED).unique(return_inverse=True)[1]}

    def aggregate(
        x: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> tuple[Float[Tensor, ""], Metrics]:
        proxy = beta * (row_mean if per == "mean" else row_sum)(x, batch.mask)
        counted = (~batch.require("rewards", by=LABELLED).isnan()).to(x.dtype)
        blank = Members(counted, counted, batch.require("group", by=LABELLED), ctx.all_sum)
        at = blank._replace(n=blank.sums(counted)[0])
        a = row_mean(batch.require("advantages", by=LABELLED), batch.mask) * counted
        r = proxy.detach()
        psi, s = group_scores(r, at, score, eps)
        agree = a.sign() * psi
        e = -a * torch.sigmoid(-agree)
        pull = pulled_back(e, psi, s, at, score, eps) * counted
        value = a.abs() * torch.nn.functional.softplus(-agree) + pull * (proxy - r)
        rows = ctx.counts.sequences.clamp(min=1).to(x.dtype)
        return value.sum() / rows, {"score/agrees": (agree > 0).to(x.dtype).sum() / rows}

    idle = () if score == "standardised" else ("eps",)
    return Parts(apply=aggregate, prepare=prepare, idle=idle)


__all__ = ["labelled_scores"]
