"""Log-ratios moved back to mean zero: of Gaussian steps, and of tokens by analogy."""

from proxpo.fields import declare_field
from proxpo.ops.kl import kl_exact
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.ratio.token import bounded_exp, check_limit
from proxpo.types import Batch, Context, PerToken

SMALLEST = 1e-6
_STEP = "each denoising step"
_MEAN = f"mean of the Gaussian policy at {_STEP} or latent thought"
GAUSSIAN = (  # fields of a Gaussian policy, which a language model does not have
    declare_field(
        "mean", "seq tok latent", source="policy", doc=f"{_MEAN}, from the current model"
    ),
    declare_field("old_mean", "seq tok latent", source="sampler", doc=f"{_MEAN}, from the sampler"),
    declare_field(
        "ref_mean", "seq tok latent", source="reference", doc=f"{_MEAN}, from the frozen reference"
    ),
    declare_field(
        "noise",
        "seq tok",
        source="sampler",
        doc=f"standard deviation of the Gaussian policy at {_STEP}, from the sampler",
    ),
    declare_field(
        "step_size", "seq tok", source="sampler", doc=f"length Δt of {_STEP}, from the sampler"
    ),
    declare_field(
        "time", "seq tok", source="sampler", doc=f"time in (0, 1) of {_STEP}, from the sampler"
    ),
    declare_field(
        "predicted_noise",
        "seq tok latent",
        source="policy",
        doc=f"noise that the denoiser predicts at {_STEP}, from the current model",
    ),
    declare_field(
        "ref_predicted_noise",
        "seq tok latent",
        source="reference",
        doc=f"noise that the denoiser predicts at {_STEP}, from the frozen reference",
    ),
)


def mean_distance(
    mean: Float[Tensor, "seq tok latent"],
    other: Float[Tensor, "seq tok latent"],
    noise: Float[Tensor, "seq tok"],
) -> Float[Tensor, "seq tok"]:
    """mean_D((μ - μ')²)/(2 s²): the KL of two Gaussians of equal width, per dimension."""
    return (mean - other).square_().mean(-1) / (2 * noise.clamp(min=SMALLEST).square())


@stage("ratio", needs=("old_logp", "mean", "old_mean", "noise"), gives="ratio")
def gaussian(*, limit: float = 20.0):
    """r̂ = exp(s (ℓ + b)), ℓ = log p - log p_old, b = mean_D(Δμ²)/(2s²). GRPO-Guard, 2510.22319.

    Log-densities are means over the D latent dimensions, so s (ℓ + b) = mean_D(Δμ·ε): zero in the
    mean and of the same spread at every step. The exponent is held within ±limit.

    limit: bound on the log-ratio, in either direction
    """
    check_limit(limit, stage="gaussian")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        bias = mean_distance(batch.mean, batch.old_mean.detach(), batch.noise)
        exponent = batch.noise * (batch.logp - batch.old_logp.detach() + bias)
        return bounded_exp(exponent, limit), {}

    return ratio


@stage("ratio", needs=("old_logp", "vocab_logp", "old_vocab_logp"), gives="ratio")
def recentred(*, limit: float = 20.0):
    """r̂ = exp(log r + KL_t(π_old‖π)), the KL over the whole vocabulary.

    What `gaussian` does, for tokens: there b is the KL of a step from the old to the new policy. An
    extension, in no paper.

    limit: bound on the log-ratio, in either direction
    """
    check_limit(limit, stage="recentred")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        kl = kl_exact(batch.old_vocab_logp.detach(), batch.vocab_logp)
        return bounded_exp(batch.logp - batch.old_logp.detach() + kl, limit), {}

    return ratio
