from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean
from proxpo.stages.ratio import ema
from proxpo.stages.trust import ppo_clip, unclipped
from proxpo.types import Recipe


@register("ema-kpo", paper="EMA-KPO (FARS)", confidence="paper formulas")
def ema_kpo(
    *,
    mode: Literal["scheduled", "fixed"] = "scheduled",
    alpha: float = 0.01,
    q: float = 1e-6,
    v: float = 1.0,
    p0: float = 1.0,
    clipped: bool = True,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    mask_mode: Literal["zero", "skip"] = "zero",
    eps: float = 1e-6,
) -> Recipe:
    """EMA-KPO: KPO's gains never look at the data, so a precomputed moving average does the same.

        ρ_t = (1-α_t) ρ_{t-1} + α_t z_t,   α_t = K_t(Q, V, P0 = 1),   r̂ = exp(ρ), then as KPO

    mode="fixed" uses the constant alpha (the paper's ablations: 0.01 and 0.0001).

    Departures: the paper's KPO starts from P0 = 1 (gain 0.5, falling), the released KPO from 0;
    p0=0 reproduces the latter. The gradient convention is KPO's, the paper does not state one.

    Reference: EMA-KPO, "Simplifying Kalman Policy Optimization with Fixed-Gain Exponential
    Smoothing", section 3.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=ema(mode=mode, alpha=alpha, q=q, v=v, p0=p0, mask_mode=mask_mode),
        trust=ppo_clip(low=clip_low, high=clip_high) if clipped else unclipped(),
        aggregate=seq_mean_token_mean(),
    )
