"""KL penalties with a fixed coefficient."""

from proxpo.ops.kl import Clamp, Estimator, kl_estimate
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


@stage("regularisers", needs=("ref_logp",))
def kl_to_ref(
    *,
    coef: float = 0.001,
    estimator: Estimator = "k3",
    clamp: Clamp = "none",
    ratio_corrected: bool = False,
):
    """β·KL(π‖π_ref) by the named estimator. ratio_corrected=True multiplies it by the ratio.

    With the token ratio, r·k3 has the gradient r·d: the unbiased reverse-KL gradient off-policy
    (arXiv:2512.02556; TRL's default when β > 0).

    coef: β, the weight of the KL
    estimator: estimator of the KL, k1, k2 or k3; docs/methods/kl-estimators.md has all
    clamp: bounds on the estimate: "none", or those of a released code, by its name
    ratio_corrected: multiply the estimate by the ratio
    """
    check_numbers("kl_to_ref", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        kl = kl_estimate(batch.logp, batch.ref_logp.detach(), estimator=estimator, clamp=clamp)
        kl = ratio * kl if ratio_corrected else kl
        return coef * kl, {"kl/ref": masked_mean(kl.detach(), batch.mask)}

    return Parts(apply=penalty, takes=("ratio",) if ratio_corrected else ())


@stage("regularisers", needs=("old_logp",))
def kl_from_old(*, coef: float, estimator: Estimator = "k3", clamp: Clamp = "none"):
    """coef · estimate of KL(π‖π_old) on tokens drawn from π_old.

    coef: weight of the KL
    estimator: estimator of the KL, k1, k2 or k3; docs/methods/kl-estimators.md has all
    clamp: bounds on the estimate: "none", or those of a released code, by its name
    """
    check_numbers("kl_from_old", "[0, inf)", coef=coef)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        kl = kl_estimate(batch.logp, batch.old_logp.detach(), estimator=estimator, clamp=clamp)
        return coef * kl, {"kl/old": masked_mean(kl.detach(), batch.mask)}

    return penalty
