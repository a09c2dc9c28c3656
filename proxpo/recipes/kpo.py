from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean
from proxpo.stages.ratio import kalman
from proxpo.stages.trust import ppo_clip, unclipped
from proxpo.types import Recipe


@register("kpo", paper="arXiv:2602.10609")
def kpo(
    *,
    ratio: Options = options_of(kalman, "q", "v", "p0", "mask_mode"),
    clipped: bool = True,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    eps: float = 1e-6,
) -> Recipe:
    """KPO: token log-ratios smoothed along the response by a causal Kalman filter.

        P⁻ = P + Q, K = P⁻/(P⁻ + V), x̂ ← (1-K) x̂ + K z, P = V K,   z = log π - log π_old
        r̂ = exp(log π - sg[log π] + sg[x̂])
        L = (1/B) Σ_i (1/L_i) Σ_t max(-A r̂, -A clip(r̂, 1-3e-4, 1+4e-4))

    clipped=False leaves the clip out. No gradient flows through the filter: a token never hears of
    the ratio of a later one.

    Departures: the released code starts from P0 = 0, where the gain rises from 1e-6; the follow-up
    paper from P0 = 1. Its float32 gains are 2.4 % off at Q = 1e-6 and its cumulative products
    underflow; here gains are exact and the scan holds to 65,536 tokens. mask_mode="skip" passes
    over masked tokens inside a response instead of counting them as observations of 0.

    Reference: arXiv:2602.10609, section 3.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=kalman(**ratio),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high) if clipped else unclipped(),
        aggregate=seq_mean_token_mean(),
    )
