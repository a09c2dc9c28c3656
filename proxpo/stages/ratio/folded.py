"""Ratios of turns that were taken under a folded context."""

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import declare_field
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import stage
from proxpo.stages.ratio.token import bounded_exp, check_limit
from proxpo.types import Batch, Context, PerToken

FOLDED = (  # fields of an environment in which the policy replaces its history by summaries
    declare_field(
        "summary",
        "seq tok",
        kind="bool",
        source="environment",
        doc="1 on tokens of a summary that replaces the history, from the environment",
    ),
    declare_field(
        "full_logp",
        "seq tok",
        source="start",
        doc="log-probability of each response token after the whole history, before the update; 0 "
        "where that history does not fit the model's context, from the trainer",
    ),
    declare_field(
        "segment_draw",
        "seq",
        source="environment",
        doc="number in [0, 1) drawn for each turn, by which a share of the turns is chosen, from "
        "the environment",
    ),
)
LEAST = -1e5  # log-probabilities below it count as missing


def check_share(drop: float, *, by: str) -> None:
    """Refuses a share of dropped turns that leaves none."""
    if not 0 <= drop < 1:
        raise ProxpoError(f"{by}: drop is a share from 0 to below 1, got {drop}")


def anchor(batch: Batch, drop: float) -> Float[Tensor, "seq tok"]:
    """log π_old under the folded context for kept turns, under the whole history for others."""
    kept = batch.segment_draw >= drop
    return torch.where(kept[:, None], batch.old_logp, batch.full_logp).detach()


def present(logp: Float[Tensor, "seq tok"]) -> Bool[Tensor, "seq tok"]:
    """True where a log-probability is known: neither 0, which stands for none, nor below -1e5."""
    return (logp != 0) & (logp >= LEAST)


@stage("ratio", needs=("old_logp", "full_logp", "segment_draw"), gives="ratio")
def folded(*, drop: float = 0.5, limit: float = 20.0):
    """r_t = exp(log π - log π_old), π_old under the folded context for a share 1 - drop of turns.

    A turn is kept where segment_draw >= drop; log π_old of the others is that of the sequence with
    the whole history. FoldAct, arXiv:2512.22733.

    drop: share of turns whose old policy is that after the whole history
    limit: bound on the log-ratio, in either direction
    """
    check_share(drop, by="ratio=folded")
    check_limit(limit, stage="folded")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        return bounded_exp(batch.logp - anchor(batch, drop), limit), {}

    return ratio


__all__ = ["FOLDED", "anchor", "folded", "present"]
