from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import greedy_baseline
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import none
from proxpo.stages.reward import kl_in_reward
from proxpo.stages.schedule import single_update
from proxpo.stages.trust import score_function
from proxpo.types import Recipe


@register("remax", paper="arXiv:2310.10505")
def remax(
    *,
    form: Literal["framework", "official"] = "framework",
    kl_coef: float = 0.0,
    gamma: float = 0.99,
    reward_clip: float = 5.0,
) -> Recipe:
    """ReMax: REINFORCE with the reward of the greedy response to the same prompt as baseline.

        A_it = Σ_{s≥t} ρ_is - b,   L = Σ m (-A log π) / Σ m

    form="official" is the repository's, A_it = γ^{L_i-t}·clip(r_i - b, ±5) - β log(π_old/π_ref)_t:
    the last token already carries one γ and the KL is not accumulated.

    form: "framework": as verl; "official": as the repository

    Departures: the paper is undiscounted without KL, which is the default here; the repository's
    script sets γ = 0.99 and β = 0.05 (`--set form=official --set kl_coef=0.05`). verl pairs the
    advantage with a PPO clip (`--set ratio=token --set trust=ppo_clip`).

    Reference: Li et al., arXiv:2310.10505, algorithm 1.
    """
    official = form == "official"
    return Recipe(
        reward=() if official else (kl_in_reward(coef=kl_coef),),
        advantage=greedy_baseline(form=form, gamma=gamma, reward_clip=reward_clip, kl_coef=kl_coef),
        ratio=none(),
        trust=score_function(),
        aggregate=token_mean(),
        schedule=single_update(),
    )
