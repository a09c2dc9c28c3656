"""Rejection of responses that are not feasible."""

import torch

from proxpo.stages import stage
from proxpo.stages.regularisers import feasible  # noqa: F401  (declares the field)
from proxpo.types import Batch, Context, Metrics


@stage("reward", needs=("rewards", "feasible"))
def feasible_only():
    """Throws infeasible responses away: neither trained on nor in any baseline.

    By itself that is biased unless the baseline is the mean of the group's feasible responses;
    regularisers=feasible_share corrects it for any other.
    """

    def reward(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        share = batch.feasible.to(batch.logp.dtype).mean()
        kept = batch.replace(
            rewards=torch.where(batch.feasible, batch.rewards, torch.nan),
            mask=batch.mask & batch.feasible[:, None],
        )
        return kept, {"reward/feasible": share}

    return reward
