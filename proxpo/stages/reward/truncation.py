"""Rewards of truncated responses."""

import torch

from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics


@stage("reward", needs=("rewards", "truncated"))
def fail_truncated(*, reward: float = 0.0):
    """r_i -> `reward` for a response cut at its length limit: over the budget is wrong.

    reward: reward of a response that was cut off
    """
    check_numbers("fail_truncated", "(-inf, inf)", reward=reward)

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        cut = batch.truncated & ~batch.rewards.isnan()
        return batch.replace(rewards=torch.where(cut, reward, batch.rewards)), {}

    return shape
