from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.ppo import ppo
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean, token_mean
from proxpo.stages.ratio import token, turn
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.schedule import clipping_bias
from proxpo.types import Recipe


@register("st-ppo", paper="arXiv:2511.20718", confidence="reconstructed")
def st_ppo(
    *,
    variant: Literal["st-ppo", "s-ppo", "turn-ppo"] = "st-ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    split: Literal["turn", "mask"] = "turn",
    schedule: Options = options_of(clipping_bias, "norm_floor", "when_unclipped"),
    critic: bool = True,
    kl_coef: float = 0.0,
    average: Literal["sequence", "token"] = "sequence",
) -> Recipe:
    """ST-PPO: one ratio per agent turn, and a gradient divided by the size of what was clipped.

        w_k = exp((1/|y^k|) Σ_{t∈k} log π/π_old) for every token of turn k
        J = (1/B) Σ_i (1/L_i) Σ_t min(w A, clip(w, 1±ε) A),   g = ∇J/‖C(θ)‖
        C(θ) = ∇ (1/B) Σ_i (1/L_i) Σ_t 1{clipped}·w A

    variant="s-ppo" has token ratios, "turn-ppo" no division. critic=False: group advantages
    (SO-GRPO). split="mask" takes runs of valid tokens as turns. `inspect` shows ∇J and, as a proxy,
    ‖∂C/∂log π‖; a trainer measures C over the parameters.

    Departures: the division is reconstructed from the abstract and reviews. Nothing clipped leaves
    the gradient alone, and norm_floor=0 divides literally, which amplifies where ‖C‖ < 1; 1 never
    does. Framework code averages over tokens. No KL; a secondary source has kl_coef=0.001.

    Reference: arXiv:2511.20718 eqs 7-8 as quoted in public reviews.
    """
    base = ppo(clip_low=clip_low, clip_high=clip_high)
    bias = clipping_bias(clip_low=clip_low, clip_high=clip_high, **schedule)
    return base.replace(
        advantage=base.advantage if critic else group_relative(),
        ratio=token() if variant == "s-ppo" else turn(split=split),
        regularisers=(kl_to_ref(coef=kl_coef),) if kl_coef else (),
        aggregate=seq_mean_token_mean() if average == "sequence" else token_mean(),
        value=base.value if critic else None,
        schedule=None if variant == "turn-ppo" else bias,
    )
