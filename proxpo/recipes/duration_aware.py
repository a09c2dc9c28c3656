from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.ppo import ppo
from proxpo.stages.weights import by_duration
from proxpo.types import Recipe

PPO = (
    "clip_low", "clip_high", "gamma", "lam", "whitening", "value_coef", "value_clip", "kl_coef",
)  # fmt: skip


@register("duration-aware", paper="arXiv:2509.01684", confidence="paper formulas")
def duration_aware(
    *,
    weights: Options = options_of(by_duration),
    base: Options = options_of(ppo, *PPO),
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
    return ppo(**base).replace(weights=(by_duration(**weights),))
