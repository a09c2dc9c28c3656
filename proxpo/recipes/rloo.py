import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import leave_one_out
from proxpo.stages.aggregate import seq_mean_token_mean, seq_mean_token_sum
from proxpo.stages.ratio import none, sequence
from proxpo.stages.reward import clip_reward, kl_in_reward
from proxpo.stages.trust import ppo_clip, score_function
from proxpo.types import Recipe


@register("rloo", paper="arXiv:2402.14740", confidence="framework code")
def rloo(
    *,
    form: Literal["paper", "trl"] = "paper",
    kl_coef: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reward_low: float | None = None,
    reward_high: float | None = None,
    normalise: bool = False,
) -> Recipe:
    """RLOO: each response is baselined by the mean reward of the others to the same prompt.

        R_i = r_i - β Σ_t (log π_old - log π_ref),   A_i = R_i - mean_{j≠i} R_j
        L = -(1/B) Σ_i A_i Σ_t log π(o_it)

    form="trl": one ratio per response, ρ_i = exp(Σ_t log π/π_old), not length-normalised, in a PPO
    clip. normalise=True standardises A over the batch. reward_low/high clip r before the KL term.

    Departures: the paper is strictly on-policy and unclipped; every framework adds a ratio and a
    clip. β = 0.05 is TRL's; a group of one has advantage 0. kl_coef=0 needs no reference model.

    Reference: Ahmadian et al., arXiv:2402.14740, section 2; Kool et al. 2019.
    """
    low = -math.inf if reward_low is None else reward_low
    high = math.inf if reward_high is None else reward_high
    bounds = () if low == -high == -math.inf else (clip_reward(low=low, high=high),)
    return Recipe(
        reward=(*bounds, kl_in_reward(coef=kl_coef, per="sequence")),
        advantage=leave_one_out(normalise=normalise),
        ratio=none() if form == "paper" else sequence(normalise=False, limit=20.0),
        trust=score_function()
        if form == "paper"
        else ppo_clip(clip_low=clip_low, clip_high=clip_high),
        aggregate=seq_mean_token_sum() if form == "paper" else seq_mean_token_mean(),
    )
