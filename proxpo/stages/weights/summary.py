"""Weights by which summaries and actions are averaged separately."""

import torch

from proxpo.ops.masked import count
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


@stage("weights", needs=("summary",))
def separate_means(*, summary: float = 1.0, action: float = 1.0):
    """λ_s N/N_s on summary tokens, λ_a N/N_a on the others. FoldAct, arXiv:2512.22733.

    The token mean of the weighted losses is λ_s·(mean over summaries) + λ_a·(mean over actions). A
    kind without tokens contributes 0, and the other one's weight stays.

    summary, action: weights of the mean over summaries and of that over actions
    """
    check_numbers("separate_means", "[0, inf)", summary=summary, action=action)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        inside = batch.mask & batch.summary
        own, other = ctx.all_sum(torch.stack([count(inside), count(batch.mask & ~inside)]))
        total = ctx.counts.tokens
        factors = (summary * total / own.clamp(min=1), action * total / other.clamp(min=1))
        first, second = (factor.to(batch.logp.dtype) for factor in factors)
        share = own / (own + other).clamp(min=1)
        return torch.where(inside, first, second), {"weights/summary": share}

    return weights
