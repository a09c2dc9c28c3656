"""Two anchors in a changing proportion: the KL-convex term of ReMix, arXiv:2507.06892."""

import math

from proxpo.ops.kl import Estimator, kl_estimate
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


def base_share(updates: int, *, hold: int = 50, every: int = 10, floor: float = 0.5) -> float:
    """λ(t) = max(1 - 0.1·⌈max(t - hold, 0)/every⌉, floor), t counting optimizer steps."""
    return max(1 - 0.1 * math.ceil(max(updates - hold, 0) / every), floor)


@stage("regularisers", needs=("ref_logp", "prev_logp"))
def kl_convex(
    *,
    coef: float = 0.01,
    share: float | None = None,
    hold: int = 50,
    every: int = 10,
    floor: float = 0.5,
    estimator: Estimator = "k3",
):
    """β·[λ·KL(π‖π_base) + (1-λ)·KL(π‖π_{k-1})]: two KL terms, not the KL to a mixture.

    λ falls from 1 to `floor` over training (`base_share`); `share` fixes it. arXiv:2507.06892.

    coef: β, the weight of both terms
    share: λ, the share of the base; none: falls over training
    hold: optimizer steps before λ falls
    every: optimizer steps between two falls by 0.1
    floor: smallest λ
    estimator: estimator of the KL, k1, k2 or k3; docs/methods/kl-estimators.md has all
    """
    check_numbers("kl_convex", "[0, inf)", coef=coef, hold=hold)
    check_numbers("kl_convex", "[1, inf)", every=every)
    check_numbers("kl_convex", "[0, 1]", share=share, floor=floor)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        lam = base_share(ctx.clock.updates, hold=hold, every=every, floor=floor)
        lam = lam if share is None else share
        base = kl_estimate(batch.logp, batch.ref_logp.detach(), estimator=estimator)
        before = kl_estimate(batch.logp, batch.prev_logp.detach(), estimator=estimator)
        return coef * (lam * base + (1 - lam) * before), {
            "kl/ref": masked_mean(base.detach(), batch.mask),
            "kl/prev": masked_mean(before.detach(), batch.mask),
            "kl/base_share": base.new_full((), lam),
        }

    return Parts(apply=penalty, idle=() if share is None else ("hold", "every", "floor"))


__all__ = ["base_share", "kl_convex"]
