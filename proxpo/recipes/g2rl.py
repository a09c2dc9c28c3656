from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.advantage import group_relative
from proxpo.stages.filter import informative
from proxpo.stages.ratio import sequence, token
from proxpo.stages.reward import gradient_novelty
from proxpo.types import Recipe


@register("g2rl", paper="arXiv:2512.15687", confidence="paper formulas")
def g2rl(
    *,
    reward: Options = options_of(gradient_novelty, "strength", "reading"),
    reward_clip: float = 3.0,
    level: Literal["token", "sequence"] = "token",
    unbiased: bool = False,
    eps: float = 1e-6,
    skip_uniform: bool = False,
    base: Options = options_of(grpo, "clip_low", "clip_high", kl_coef=0.001),
) -> Recipe:
    """G2RL: GRPO whose rewards grow with the novelty of the response's gradient direction.

        φ_t = W[y_t] - Σ_v p_t(v) W[v],   Φ = mean_t φ_t,   S_ij = cos(Φ_i, Φ_j)
        ν_i = max(1 - Σ_{j≠i} w_ij S_ij², 0),   w_ij ∝ e^{r_j},   ν̄ = ν scaled to [0, 1] per group
        r̃_i = clip(r_i (1 + λ ν̄_i), ±3),   A_i = (r̃_i - mean_g)/(std_g + δ)

    Made for r = ±1; a reward of 0 stays 0. reading: eq. 12 as "printed", 1 + λ r ν̄, rewards novel
    mistakes; the prose, "described", punishes them more; "signed" also makes light of old ones.
    Groups of equal rewards get a gradient too, unless skip_uniform. level="sequence": the ratio of
    whole responses, as the paper writes it, not divided by their length.

    level: ratio of a "token", or of the "sequence": the product over its tokens
    skip_uniform: leave out prompts whose rewards are all equal

    Departures: λ is not given in the paper; 1 is our choice. The divisor has δ outside the root.
    Novelties that differ by less than 1e-6 count as equal.

    Reference: Liang et al., arXiv:2512.15687 eqs 5-13.
    """
    return grpo(**base).replace(
        reward=(gradient_novelty(clip=reward_clip, **reward),),
        filter=(informative(),) if skip_uniform else (),
        advantage=group_relative(eps=eps, unbiased=unbiased),
        ratio=token() if level == "token" else sequence(normalise=False),
    )
