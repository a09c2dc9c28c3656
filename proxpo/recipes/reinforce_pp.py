from proxpo.recipes._registry import register
from proxpo.stages.advantage import discounted_return
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.reward import kl_in_reward
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("reinforce-pp", paper="arXiv:2501.03262")
def reinforce_pp(
    *,
    kl_coef: float = 0.01,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    whiten_unbiased: bool = True,
) -> Recipe:
    """REINFORCE++: PPO's clip on returns that are normalised over the whole batch, without critic.

        ρ_it = 1[t last]·r_i - β(log π_old - log π_ref)_t,   A_it = Σ_{s≥t} γ^{s-t} ρ_is
        Â = (A - μ)/σ over all valid tokens,   L = token mean of max(-Â r, -Â clip(r, 1±ε))

    Departures: verl whitens with the unbiased variance (default here), OpenRLHF with the population
    variance (whiten_unbiased=False). The token-weighted μ lets long responses dominate. β = 0.01 is
    OpenRLHF's; kl_coef=0 needs no reference model.

    Reference: Hu et al., arXiv:2501.03262v9, eqs 4-5.
    """
    return Recipe(
        reward=(kl_in_reward(coef=kl_coef),),
        advantage=discounted_return(gamma=gamma, whitening=True, whiten_unbiased=whiten_unbiased),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high),
        aggregate=token_mean(),
    )
