from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.schedule import split_passes
from proxpo.stages.trust import ppo_clip
from proxpo.stages.weights import probability_reweight
from proxpo.types import Recipe


@register("lopti", paper="arXiv:2505.12929")
def lopti(
    *,
    variant: Literal["both", "ar", "lopti"] = "both",
    alpha: float = 0.3,
    schedule: Options = options_of(split_passes),
    clip_low: float = 0.2,
    clip_high: float = 0.24,
    dual: float | None = 10.0,
    kl_coef: float = 0.001,
) -> Recipe:
    """Lopti and AR: keep rare tokens, whose gradients are largest, from dominating.

        AR:     Â_it = [α·π_old + (1-α)]·A_it
        Lopti:  first a whole update loop with the tokens of π_old < η, then one with the others
        L = (1/N) Σ max(-Â r, -Â clip(r, 1-0.2, 1+0.24)) + β k3, each pass on its tokens only

    The recipe's own loss is the sum of the two passes, which its schedule makes; N counts all valid
    tokens in each. high_first=True: the ablation that collapses.

    variant: "ar", "lopti" or both

    Departures: the paper writes the current π and p ≤ η; the code, followed here, the rollout's
    π_old and p < η. α = 0.3, η = 0.5 are the paper's K&K values (scripts: 0.2, 0.4).

    Reference: Yang et al., arXiv:2505.12929.
    """
    return Recipe(
        advantage=group_relative(),
        weights=() if variant == "lopti" else (probability_reweight(alpha=alpha),),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual),
        regularisers=(kl_to_ref(coef=kl_coef),) if kl_coef else (),
        aggregate=token_mean(),
        schedule=None if variant == "ar" else split_passes(**schedule),
    )
