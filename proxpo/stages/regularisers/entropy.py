"""Penalties against a loss of entropy."""

import torch

from proxpo.ops.extremes import top_share
from proxpo.ops.masked import count, masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.trust.covariance import covariance
from proxpo.types import Batch, Context, PerToken, Scope, local


@stage("regularisers", needs=("entropy",))
def entropy_bonus(*, coef: float):
    """-coef · H of the next-token distribution; `entropy` must carry gradient to have an effect.

    coef: weight of the entropy
    """
    check_numbers("entropy_bonus", "(-inf, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        return -coef * batch.entropy, {"entropy": masked_mean(batch.entropy.detach(), batch.mask)}

    return penalty


@stage("regularisers", needs=("old_logp",))
def covariance_penalty(*, share: float = 2e-3, coef: float = 1.0, scope: Scope = "batch"):
    """coef·|log π - log π_old| on the max(1, ⌊share·N⌋) tokens of largest covariance. KL-Cov.

    Covariance of log-probability and advantage over N valid tokens; tokens that tie for the last
    places share them; share=0 selects none. arXiv:2505.22617 eqs 13-14 (the paper writes a KL, the
    code |log-ratio|).

    share: share of the tokens that is penalised
    coef: weight of |log-ratio|
    scope: "batch": N tokens of the whole optimizer step; "microbatch": of each micro-batch
    """
    check_numbers("covariance_penalty", "[0, 1]", share=share)
    check_numbers("covariance_penalty", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        if not share:
            chosen = torch.zeros_like(batch.logp)
        else:
            all_sum = ctx.all_sum if scope == "batch" else local
            n = int(all_sum(count(batch.mask)))
            k = min(max(1, int(share * n)), n)
            chosen = top_share(covariance(batch, all_sum=all_sum), batch.mask, k, all_sum=all_sum)
        distance = (batch.logp - batch.old_logp.detach()).abs()
        return coef * distance * chosen, {"weights/selected": masked_mean(chosen, batch.mask)}

    idle = () if share else ("scope",)
    return Parts(apply=penalty, idle=idle)
