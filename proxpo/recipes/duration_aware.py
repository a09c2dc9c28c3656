from proxpo.recipes._registry import register
from proxpo.recipes.ppo import ppo
from proxpo.stages.weights import by_duration
from proxpo.types import Recipe


@register("duration-aware", paper="arXiv:2509.01684", confidence="paper formulas")
def duration_aware(
    *,
    max_weight: float | None = None,
    min_duration: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitening: bool = True,
    value_coef: float = 1.0,
    value_clip: float | None = 0.5,
    kl_coef: float = 0.0,
) -> Recipe:
    """Duration-aware PPO: each action's gradient is weighed by the time its execution took.

        w_i = Δt_i / mean(Δt),   L = token mean of w_i max(-A r, -A clip(r, 1±ε)) + value loss

    For asynchronous collection, where an action that runs for Δt is sampled π/Δt times as often:
    the weight removes that bias. Collected in lockstep, slow actions would be favoured instead. A
    time-out counts with the time it took. `proxpo.stages.reward.progress_reward` gives failed
    programs partial credit for how far they came.

    Departures: the critic's loss is not weighed and only the environment's time counts, both open
    in the paper. max_weight and min_duration are additions, off by default.

    Reference: arXiv:2509.01684.
    """
    base = ppo(
        clip_low=clip_low,
        clip_high=clip_high,
        gamma=gamma,
        lam=lam,
        whitening=whitening,
        value_coef=value_coef,
        value_clip=value_clip,
        kl_coef=kl_coef,
    )
    return base.replace(weights=(by_duration(max_weight=max_weight, min_duration=min_duration),))
