from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean, seq_mean_token_sum
from proxpo.stages.ratio import sequence
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("gspo", paper="arXiv:2507.18071", confidence="paper formulas")
def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    variant: Literal["sequence", "token", "luspo"] = "sequence",
    kl_coef: float = 0.0,
    eps: float = 1e-6,
) -> Recipe:
    """GSPO: one length-normalised ratio per response; whole responses are clipped, not tokens.

        s_i = exp((1/L_i) Σ_t log π/π_old),   L = (1/B) Σ_i max(-A s, -A clip(s, 1-ε_lo, 1+ε_hi))

    variant="token" (eqs 13-14) gives each token the gradient of its own log-probability, for
    advantages per token; equal to "sequence" when A is constant in a response. variant="luspo"
    (arXiv:2602.05261) multiplies each response's term by L_i.

    Departures: verl implements the token form for both and applies any average; only the mean of
    response means is the paper's. ScaleRL found 3e-3 and 4e-3 better for an 8B dense model.

    Reference: Zheng et al., arXiv:2507.18071 eqs 5-7, 13-14.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=sequence(own_gradient=variant == "token"),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high),
        regularisers=(kl_to_ref(coef=kl_coef),) if kl_coef else (),
        aggregate=seq_mean_token_sum() if variant == "luspo" else seq_mean_token_mean(),
    )
