from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import sequence
from proxpo.stages.trust import gamma_weight
from proxpo.types import Recipe


@register("vespo", paper="arXiv:2602.10693", confidence="framework code")
def vespo(
    *,
    trust: Options = options_of(gamma_weight),
    scale: Literal["group", "batch", "centred", "none"] = "group",
    eps: float = 1e-6,
) -> Recipe:
    """VESPO: a smooth weight of the whole response's ratio, which falls to 0 far from 1.

        W_i = Π_t π/π_old,   φ(W) = W^k·exp(λ(1-W)),   L = (1/N) Σ_i Σ_t -sg[φ(W_i)]·A_i·log π

    (k, λ) = (2, 3) where A >= 0, (3, 2) where A < 0. No length normalises W, so it leaves 1 fast
    in long responses. φ(1) = 1: fresh data give REINFORCE.

    Departures: the paper sums over the tokens of a response, its code averages over all tokens; it
    has no std in the advantage (scale=none), its code has verl's. The code multiplies truncated
    corrections for the sampler into W; `ratio.anchor=rollout` takes W against the sampler itself.

    Reference: Shen et al., arXiv:2602.10693 eq. 20.
    """
    return Recipe(
        advantage=group_relative(scale=scale, eps=eps),
        ratio=sequence(normalise=False, limit=20.0),
        trust=gamma_weight(**trust),
        aggregate=token_mean(),
    )
