"""Responses that take no part in the statistics of their group."""

from collections.abc import Mapping
from typing import Any

from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics


def _needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("rewards", *(name for name in ("truncated", "void") if options[name]))


@stage("reward", needs=_needs)
def usable_only(*, truncated: bool = False, void: bool = False):
    """r_i -> NaN, no reward, for a response without a token: its group's statistics ignore it.

    truncated=True: also for one cut at its length limit; void=True: also for one with a void turn.
    """

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        usable = batch.mask.any(dim=1)
        if truncated:
            usable = usable & ~batch.truncated
        if void:
            usable = usable & ~batch.void
        return batch.replace(rewards=batch.rewards.masked_fill(~usable, float("nan"))), {}

    return shape
