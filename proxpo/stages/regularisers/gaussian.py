"""Distance of a Gaussian policy to its reference."""

from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.gaussian import mean_distance
from proxpo.types import Batch, Context, PerToken


@stage("regularisers", needs=("mean", "ref_mean", "noise"))
def gaussian_kl(*, coef: float):
    """coef · mean_D((μ - μ_ref)²)/(2 s²): KL(π‖π_ref) of a denoising step, per dimension.

    coef: weight of the KL
    """
    check_numbers("gaussian_kl", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        kl = mean_distance(batch.mean, batch.ref_mean.detach(), batch.noise)
        return coef * kl, {"kl/ref": masked_mean(kl.detach(), batch.mask)}

    return penalty


@stage("regularisers", needs=("predicted_noise", "ref_predicted_noise"))
def noise_distance(*, coef: float = 0.01):
    """coef · mean_D((e - e_ref)²), e the predicted noise. DPOK, arXiv:2305.16381.

    Stands for the KL of the denoising steps, whose weights by time are left out.

    coef: weight of the distance
    """
    check_numbers("noise_distance", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        gap = (batch.predicted_noise - batch.ref_predicted_noise.detach()).square().mean(-1)
        return coef * gap, {"kl/noise": masked_mean(gap.detach(), batch.mask)}

    return penalty
