"""Covariance of a token's log-probability and advantage, which drives entropy down."""

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.types import Batch


def covariance(batch: Batch) -> Float[Tensor, "seq tok"]:
    """(A - Ā)(log π - mean log π) over the valid tokens, detached. arXiv:2505.22617 eq. 10."""
    logp, adv = batch.logp.detach(), batch.advantages
    return (adv - masked_mean(adv, batch.mask)) * (logp - masked_mean(logp, batch.mask))
