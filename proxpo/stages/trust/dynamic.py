"""Clip bounds that widen for tokens of low probability under the old policy."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.trust.clip import check_dual, clip_between
from proxpo.types import Batch, Context, PerToken

Bounds = tuple[Float[Tensor, "seq tok"], Float[Tensor, "seq tok"]]


def dynamic_bounds(
    old_logp: Float[Tensor, "seq tok"], *, low: float, high: float, most: float
) -> Bounds:
    """lo = ½ + ½√max(1 - 4ε_lo/q, 0),   hi = min(½ + ½√(1 + 4ε_hi/q), most),   q = π_old.

    The solutions of |(r - 1) r q| ≤ ε, so that probabilities, not ratios, move equally far.
    """
    q = old_logp.exp().clamp(min=torch.finfo(old_logp.dtype).tiny)
    lower = 0.5 + 0.5 * (1 - 4 * low / q).clamp(min=0).sqrt()
    upper = 0.5 + 0.5 * (1 + 4 * high / q).sqrt()
    return lower, upper.clamp(max=most)


@stage("trust", needs=("old_logp",), takes=("ratio",), gives="loss")
def dynamic_clip(
    *, clip_low: float = 0.16, clip_high: float = 0.2, most: float = 10.0, dual: float | None = 10.0
):
    """x = max(-A r, -A clip(r, lo_t, hi_t)) with bounds from π_old. DCPO, arXiv:2509.02333.

    lo is in [0.5, 1), hi in (1, most]. dual=c: where A < 0, x is held below c|A|.
    """
    low, high = clip_low, clip_high
    if not (0 <= low < torch.inf and 0 <= high < torch.inf):
        raise ProxpoError(f"dynamic_clip: bounds must be finite and >= 0, got {low} and {high}")
    if not most >= 1:
        raise ProxpoError(f"dynamic_clip: most must be at least 1, got {most}")
    check_dual(dual, by="dynamic_clip")

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        lower, upper = dynamic_bounds(batch.old_logp.detach(), low=low, high=high, most=most)
        x, clipped = clip_between(ratio, batch.advantages, lower, upper, dual=dual)
        return x, {
            "trust/clipped": masked_mean(clipped, batch.mask),
            "trust/low": masked_mean(lower, batch.mask),
            "trust/high": masked_mean(upper, batch.mask),
        }

    return surrogate
