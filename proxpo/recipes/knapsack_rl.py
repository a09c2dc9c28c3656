from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.budget import knapsack
from proxpo.stages.ratio import token
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("knapsack-rl", paper="arXiv:2509.25849")
def knapsack_rl(
    *,
    low: int = 2,
    high: int = 128,
    positive: int = 2,
    negative: int = 2,
    min_history: int = 8,
    window: int = 16,
    fallback: bool = True,
    code_compat: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    bound: float = 5.0,
    eps: float = 1e-6,
) -> Recipe:
    """Knapsack RL: rollouts go where they are most likely to give a gradient worth having.

        maximise Σ_i [1 - p_i^N - (1-p_i)^N]·p_i(1-p_i)²,   Σ N_i = M n,   low ≤ N_i ≤ high
        A_i = (r_i - mean_g)/(std_g + δ) within ±5,   L = (1/N) Σ max(-A r, -A clip(r, 0.8, 1.28))

    p_i is the prompt's recorded pass rate. Prompts with little history keep n rollouts, solved and
    unsolved ones get `positive` and `negative`. What the others are not expected to need goes to
    unsolved prompts (fallback=False: it stays).

    Departures: the allocation is the exact optimum; code_compat=True is the released dynamic
    programme, which values no extra rollout at 0. Where all prompts take part the surplus stays
    with the knapsack (the released fallback fails there).

    Reference: arXiv:2509.25849; liziniu/KnapsackRL.
    """
    rollouts = knapsack(
        low=low, high=high, positive=positive, negative=negative, min_history=min_history,
        window=window, fallback=fallback, code_compat=code_compat,
    )  # fmt: skip
    return Recipe(
        budget=(rollouts,),
        advantage=group_relative(eps=eps, bound=bound),
        ratio=token(),
        trust=ppo_clip(low=clip_low, high=clip_high),
        aggregate=token_mean(),
    )
