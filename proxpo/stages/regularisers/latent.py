"""Distance of a policy with latent thoughts to its reference."""

import torch

from proxpo.ops.bounds import hold_within
from proxpo.ops.kl import kl_estimate
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.latent import check_sigma, thought_logp
from proxpo.types import Batch, Context, PerToken


@stage("regularisers", needs=("ref_logp", "mean", "ref_mean", "latent", "thought"))
def latent_kl(*, coef: float = 0.01, sigma: float = 10.0):
    """coef · k3 of KL(π‖π_ref), the log-ratio within ±10; a latent thought counts like a token.

    Its log-probability is -‖z - μ‖²/(2σ²). VLPO, arXiv:2511.21395.

    coef: weight of the KL
    sigma: σ, the width of the Gaussian of a latent thought
    """
    check_numbers("latent_kl", "[0, inf)", coef=coef)
    check_sigma(sigma, by="regularisers=latent_kl")

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        thought = batch.thought.detach()
        now, other = (
            thought_logp(thought, m, sigma) for m in (batch.mean, batch.ref_mean.detach())
        )
        logp = torch.where(batch.latent, now, batch.logp)
        ref_logp = torch.where(batch.latent, other, batch.ref_logp.detach())
        kl = kl_estimate(hold_within(logp - ref_logp, 10.0), torch.zeros_like(logp))
        return coef * kl, {"kl/ref": masked_mean(kl.detach(), batch.mask)}

    return penalty
