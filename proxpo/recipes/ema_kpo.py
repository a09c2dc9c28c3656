from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.kpo import kpo
from proxpo.stages.ratio import ema
from proxpo.types import Recipe


@register("ema-kpo", paper="EMA-KPO (FARS)", confidence="paper formulas")
def ema_kpo(
    *,
    ratio: Options = options_of(ema, "mode", "alpha", "q", "v", "p0", "mask_mode"),
    base: Options = options_of(kpo, "clipped", "clip_low", "clip_high", "eps"),
) -> Recipe:
    """EMA-KPO: KPO's gains never look at the data, so a precomputed moving average does the same.

        ρ_t = (1-α_t) ρ_{t-1} + α_t z_t,   α_t = K_t(Q, V, P0 = 1),   r̂ = exp(ρ), then as KPO

    mode="fixed" uses the constant alpha (the paper's ablations: 0.01 and 0.0001).

    clipped: clip the smoothed ratio

    Departures: the paper's KPO starts from P0 = 1 (gain 0.5, falling), the released KPO from 0;
    p0=0 reproduces the latter. The gradient convention is KPO's, the paper does not state one.

    Reference: EMA-KPO, "Simplifying Kalman Policy Optimization with Fixed-Gain Exponential
    Smoothing", section 3.
    """
    return kpo(**base).replace(ratio=ema(**ratio))
