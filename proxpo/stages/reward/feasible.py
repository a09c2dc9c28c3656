"""Rejection of responses that are not feasible."""

import torch

from proxpo.stages import stage
from proxpo.stages.regularisers import feasible  # noqa: F401  (declares the field)
from proxpo.types import Batch, Context, Metrics


@stage("reward", needs=("rewards", "feasible"))
def feasible_only():
    """Throws infeasible responses away: neither trained on nor in any baseline.

    By itself that is biased unless advantages add up to 0 over the feasible responses of a group;
    regularisers=feasible_share corrects it for all others.
    """

    def reward(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        share = batch.feasible.to(batch.logp.dtype).mean()
        kept = batch.replace(
            rewards=torch.where(batch.feasible, batch.rewards, torch.nan),
            mask=batch.mask & batch.feasible[:, None],
        )
        return kept, {"reward/feasible": share}

    return reward
