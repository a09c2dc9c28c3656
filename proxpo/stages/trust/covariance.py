"""Covariance of a token's log-probability and advantage, which drives entropy down."""

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.types import AllSum, Batch, local


def covariance(batch: Batch, *, all_sum: AllSum = local) -> Float[Tensor, "seq tok"]:
    """(A - Ā)(log π - mean log π) over the valid tokens, detached. arXiv:2505.22617 eq. 10.

    `all_sum` makes the means those of the whole step.
    """
    logp, adv = batch.logp.detach(), batch.advantages
    mean_adv = masked_mean(adv, batch.mask, all_sum=all_sum)
    mean_logp = masked_mean(logp, batch.mask, all_sum=all_sum)
    return (adv - mean_adv) * (logp - mean_logp)
