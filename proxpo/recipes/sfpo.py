from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.schedule import fast_slow
from proxpo.types import Recipe


@register("sfpo", paper="arXiv:2510.04072", confidence="paper formulas")
def sfpo(
    *,
    fast_steps: int = 3,
    schedule: Options = options_of(
        fast_slow, "alpha", "trigger", "window", "latch", "restore_optimizer"
    ),
    base: Options = options_of(grpo, "clip_low", "clip_high", "kl_coef"),
) -> Recipe:
    """SFPO: K fast steps on a batch, a pull back towards the start, one more step from there.

        θ_{k+1} = θ_k - η ∇L(θ_k), k < K;   θ̃ = θ₀ + α(θ_K - θ₀);   θ' = θ̃ - η ∇L(θ̃)

    L is GRPO's; `schedule=fast_slow` gives any other recipe the same steps. α becomes 0, one plain
    update, once the entropy leaves its recent mean by `trigger` standard deviations.

    Departures: no code was released. trigger, window, and that the entropy judged is not part of
    its own window are our choices; latch=False lets α come back. One optimizer runs through all
    steps, as the paper's memory figures say; restore_optimizer=True puts its moments back.

    Reference: arXiv:2510.04072.
    """
    return grpo(**base).replace(schedule=fast_slow(steps=fast_steps, **schedule))
