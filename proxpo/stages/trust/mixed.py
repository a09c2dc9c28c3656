"""A clip centred on the ratio of the policy before the update. ReMix, arXiv:2507.06892."""

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.trust.clip import clip_between
from proxpo.types import Batch, Context, PerToken


@stage("trust", needs=("old_logp", "prox_logp"), takes=("ratio",), gives="loss")
def mixed_clip(*, clip_low: float = 0.2, clip_high: float = 0.2):
    """max(-A r, -A clip(r, c-ε_lo, c+ε_hi)), c = π_k/π_old detached, π_k the policy of `prox_logp`.

    Fresh data have c = 1, the PPO clip. Stale data keep their importance weight c and move from
    there; a negative lower bound never binds.
    """
    low, high = clip_low, clip_high
    if low < 0 or high < 0:
        raise ProxpoError(f"mixed_clip: the clip range must not be negative, got {low} and {high}")

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        centre = (batch.prox_logp - batch.old_logp).detach().exp()
        x, clipped = clip_between(ratio, batch.advantages, centre - low, centre + high)
        return x, {
            "trust/clipped": masked_mean(clipped, batch.mask),
            "trust/centre": masked_mean(centre, batch.mask),
        }

    return surrogate


__all__ = ["mixed_clip"]
