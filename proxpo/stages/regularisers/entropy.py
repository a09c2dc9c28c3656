"""Penalties against a loss of entropy."""

import torch

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.trust.covariance import covariance
from proxpo.types import Batch, Context, PerToken


@stage("regularisers", needs=("entropy",))
def entropy_bonus(*, coef: float):
    """-coef · H of the next-token distribution; `entropy` must carry gradient to have an effect.

    coef: weight of the entropy
    """
    check_numbers("entropy_bonus", "(-inf, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        return -coef * batch.entropy, {"entropy": masked_mean(batch.entropy.detach(), batch.mask)}

    return penalty


@stage("regularisers", needs=("old_logp",), whole_batch=False)
def covariance_penalty(*, share: float = 2e-3, coef: float = 1.0):
    """coef·|log π - log π_old| on the max(1, ⌊share·N⌋) tokens of largest covariance. KL-Cov.

    Covariance of log-probability and advantage over the N valid tokens of the micro-batch;
    share=0 selects none. arXiv:2505.22617 eqs 13-14 (the paper writes a KL, the code |log-ratio|).

    share: share of the tokens that is penalised
    coef: weight of |log-ratio|
    """
    check_numbers("covariance_penalty", "[0, 1]", share=share)
    check_numbers("covariance_penalty", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        n = int(batch.mask.sum())
        k = min(max(1, int(share * n)), n) if share else 0
        rank = (
            torch.where(batch.mask, covariance(batch), -torch.inf)
            .flatten()
            .topk(k, sorted=False)
            .indices
        )
        chosen = torch.zeros_like(batch.mask).flatten()
        chosen[rank] = True
        chosen = chosen.view_as(batch.mask)
        distance = (batch.logp - batch.old_logp.detach()).abs()
        return coef * distance * chosen, {"weights/selected": masked_mean(chosen, batch.mask)}

    return penalty
