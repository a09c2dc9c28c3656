from collections.abc import Callable
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.recipes.grpo import grpo
from proxpo.stages.reward import dither
from proxpo.types import Recipe


@register("redit", paper="arXiv:2506.18631", confidence="reconstructed")
def redit(
    *,
    noise: float | Callable[[int], float] = 0.05,
    distribution: Literal["gaussian", "uniform"] = "gaussian",
    scale: Literal["group", "batch", "centred", "none"] = "group",
    eps: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
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
    base = grpo(scale=scale, eps=eps, clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef)
    return base.replace(reward=(dither(scale=noise, distribution=distribution),))
