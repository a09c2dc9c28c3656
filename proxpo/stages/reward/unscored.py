"""Responses that take no part in the statistics of their group."""

from proxpo.stages import Parts, stage
from proxpo.types import Batch, Context, Metrics


@stage("reward")
def usable_only(*, truncated: bool = False, void: bool = False):
    """r_i -> NaN, no reward, for a response without a token: its group's statistics ignore it.

    truncated=True: also for one cut at its length limit; void=True: also for one with a void turn.

    truncated: drop the rewards of responses that were cut off
    void: drop the rewards of responses with a void turn
    """

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        usable = batch.mask.any(dim=1)
        if truncated:
            usable = usable & ~batch.truncated
        if void:
            usable = usable & ~batch.void
        return batch.replace(rewards=batch.rewards.masked_fill(~usable, float("nan"))), {}

    marks = [name for name, read in (("truncated", truncated), ("void", void)) if read]
    return Parts(apply=shape, needs=("rewards", *marks))
