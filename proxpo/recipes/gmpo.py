from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean
from proxpo.stages.ratio import geometric_clip
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("gmpo", paper="arXiv:2507.20673")
def gmpo(
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    clip_per: Literal["token", "sequence", "none"] = "token",
    normalise: bool = True,
    kl_coef: float = 0.0,
    eps: float = 1e-6,
) -> Recipe:
    """GMPO: the geometric mean of token ratios, each log-ratio clipped one-sidedly before.

        d' = min(d, c_hi) if A > 0 else max(d, -c_lo),   g_i = exp((1/L_i) Σ_t d')
        L = -(1/B) Σ_i A_i g_i

    Bounds are in log space: 0.4 is the ratio band (0.67, 1.49). A clipped token counts in g_i but
    gets no gradient. clip_per="sequence" and "none", normalise=False: the paper's ablations.

    Departures: verl counts fully masked responses in the mean and treats A = 0 as unclipped 0; both
    leave the loss of the others alone here.

    Reference: Zhao et al., arXiv:2507.20673 eq. 3.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=geometric_clip(
            clip_low=clip_low, clip_high=clip_high, per=clip_per, normalise=normalise
        ),
        trust=unclipped(),
        regularisers=(kl_to_ref(coef=kl_coef),) if kl_coef else (),
        aggregate=seq_mean_token_mean(),
    )
