from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean
from proxpo.stages.ratio import sequence, token
from proxpo.stages.trust import soft_gate
from proxpo.types import Recipe


@register("sapo", paper="arXiv:2511.20347", confidence="framework code")
def sapo(
    *,
    trust: Options = options_of(soft_gate),
    level: Literal["token", "sequence"] = "token",
    eps: float = 1e-6,
) -> Recipe:
    """SAPO: a smooth sigmoid gate on the ratio instead of a clip, sharper for negative advantages.

        L = (1/B) Σ_i (1/L_i) Σ_t -(4/τ)·σ(τ(r-1))·A,   τ = τ_pos if A > 0 else τ_neg

    The gradient weight sech²(τ(r-1)/2)·r is 1 on-policy and never exactly 0. level="sequence" gates
    GSPO's ratio instead (AReaL).

    level: ratio of a "token", or GSPO's of the "sequence"

    Departures: none known; the loss is offset by -2A/τ against -A r, so compare gradients.

    Reference: arXiv:2511.20347.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=token() if level == "token" else sequence(),
        trust=soft_gate(**trust),
        aggregate=seq_mean_token_mean(),
    )
