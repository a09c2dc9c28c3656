import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import smooth_standardised
from proxpo.stages.aggregate import seq_sum_token_mean, token_mean
from proxpo.stages.ratio import token
from proxpo.stages.trust import dynamic_clip
from proxpo.types import Recipe


@register("dcpo", paper="arXiv:2509.02333")
def dcpo(
    *,
    clip_low: float = 0.16,
    clip_high: float = 0.2,
    ratio_max: float = 10.0,
    dual: float | None = 10.0,
    history: bool = True,
    average: Literal["otm", "token"] = "otm",
) -> Recipe:
    """DCPO: wider clips for improbable tokens, rewards standardised over all visits of a prompt.

        lo = ½ + ½√max(1 - 4ε_lo/q, 0),   hi = min(½ + ½√(1 + 4ε_hi/q), 10),   q = π_old
        A = the smaller of S_new, S_tot:   S_new = ((i-1)/i) A_new + (1/i) A_tot, S_tot the reverse
        L = Σ_i (1/L_i) Σ_t max(-A r, -A clip(r, lo, hi)), held below 10|A| where A < 0

    A_new standardises within the present group, A_tot against all i visits of the prompt up to now,
    so that a group of equal rewards can still teach. history=False: every visit is the first.

    Departures: the released scripts have ε 0.2/0.28, switch the history off (history=False) and
    average over all tokens of the micro-batch (average="token"). Variances are pooled as theirs.
    A group with fewer than two rewards gets 0.

    Reference: arXiv:2509.02333; lime-RL/DCPO.
    """
    return Recipe(
        advantage=smooth_standardised(history=history),
        ratio=token(limit=math.inf),
        trust=dynamic_clip(clip_low=clip_low, clip_high=clip_high, most=ratio_max, dual=dual),
        aggregate=seq_sum_token_mean() if average == "otm" else token_mean(),
    )
