from collections.abc import Callable

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.reward import dither
from proxpo.types import Recipe


@register("redit", paper="arXiv:2506.18631", confidence="reconstructed")
def redit(
    *,
    noise: float | Callable[[int], float] = 0.05,
    reward: Options = options_of(dither, "distribution"),
    base: Options = options_of(grpo, "scale", "eps", "clip_low", "clip_high", "kl_coef"),
) -> Recipe:
    """ReDit: GRPO on rewards to which a little noise was added, so that equal ones differ.

        r̃_i = r_i + ε_i,   ε ~ N(0, σ²) or U(-a, a),   A_i = (r̃_i - mean_g)/(std_g + δ)

    `noise` is σ, or a with distribution="uniform" (σ = a/√3), or a function of the step. One draw
    per response, kept for all updates on the rollout. A group of equal rewards gets advantages of
    mean 0 and full size, however small the noise; with scale="none" they have its size.

    Departures: reconstructed from the abstract and from summaries; no code was published to
    compare with. The best radius reported for uniform noise is 0.05; σ = 0.05 is our choice.

    Reference: arXiv:2506.18631.
    """
    return grpo(**base).replace(reward=(dither(scale=noise, **reward),))
