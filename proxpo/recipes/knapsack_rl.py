from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.budget import knapsack
from proxpo.stages.ratio import token
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe

KNAPSACK = (
    "low", "high", "positive", "negative", "min_history", "window", "fallback", "code_compat",
)  # fmt: skip


@register("knapsack-rl", paper="arXiv:2509.25849")
def knapsack_rl(
    *,
    budget: Options = options_of(knapsack, *KNAPSACK),
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
    return Recipe(
        budget=(knapsack(**budget),),
        advantage=group_relative(eps=eps, bound=bound),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high),
        aggregate=token_mean(),
    )
