from proxpo.recipes._registry import register
from proxpo.stages.advantage import length_weighted_baseline
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.schedule import single_update
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("opo", paper="arXiv:2505.23585")
def opo(*, clip_low: float = 0.2, clip_high: float = 0.2) -> Recipe:
    """OPO: exactly on-policy updates with the length-weighted group mean as baseline.

        A_i = r_i - Σ_j L_j r_j / Σ_j L_j,   L = token mean of max(-A r, -A clip(r, 1±ε))

    One update per rollout, so r = 1 and the clip never acts; no KL, no entropy term, no std.

    Departures: the derivation is for sums over tokens (`--set aggregate=seq_mean_token_sum`); the
    released configuration averages over tokens, which is the default here. A group of one keeps its
    raw reward, as in verl.

    Reference: Hao et al., arXiv:2505.23585, section 3.
    """
    return Recipe(
        advantage=length_weighted_baseline(),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high),
        aggregate=token_mean(),
        schedule=single_update(),
    )
