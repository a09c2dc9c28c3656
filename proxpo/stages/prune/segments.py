"""Turns that are trained on, of an episode whose context was folded."""

from typing import Literal

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.ratio.folded import anchor, check_share, present
from proxpo.types import Batch, Context, Metrics

Keep = tuple[Bool[Tensor, "seq tok"], Metrics]


@stage("prune")
def segments(*, drop: float = 0.5, dropped: Literal["skip", "flat"] = "skip"):
    """Drops turns with segment_draw < drop, a random share of them. FoldAct, arXiv:2512.22733.

    dropped="skip": they are left out, and cost no pass. "flat": they stay, with the log-probability
    after the whole history in place of that under the folded context (ratio=folded), and tokens
    without a known one (0 or below -1e5) are left out.

    drop: share of the turns that is dropped
    dropped: "skip" them, or train them on the "flat" history
    """
    check_share(drop, by="prune=segments")

    def known(batch: Batch, ctx: Context) -> Keep:
        kept = present(anchor(batch, drop))
        return kept, {"prune/kept": masked_mean(kept, batch.mask)}

    def chosen(batch: Batch, ctx: Context) -> Keep:
        kept = (batch.segment_draw >= drop)[:, None].expand_as(batch.mask)
        return kept, {"prune/kept": masked_mean(kept, batch.mask)}

    if dropped == "skip":
        return Parts(apply=chosen, needs=("segment_draw",))
    return Parts(apply=known, needs=("old_logp", "full_logp", "segment_draw"))
