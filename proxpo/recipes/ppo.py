from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import gae
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import entropy_bonus
from proxpo.stages.reward import kl_in_reward
from proxpo.stages.trust import ppo_clip
from proxpo.stages.value import value_loss
from proxpo.types import Recipe


@register("ppo", paper="arXiv:1707.06347", confidence="framework code")
def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitening: bool = True,
    value_coef: float = 1.0,
    value_clip: float | None = 0.5,
    kl_coef: float = 0.0,
    kl_controller: Literal["fixed", "horizon", "doubling"] = "fixed",
    kl_target: float = 0.1,
    kl_horizon: float = 10000.0,
    entropy_coef: float = 0.0,
) -> Recipe:
    """PPO: a pessimistic clipped ratio surrogate on GAE advantages from a learned critic.

        δ_t = ρ_t + γ V_next - V_t,   A_t = δ_t + γλ A_next, whitened over all valid tokens
        L = token mean of max(-A r, -A clip(r, 1-ε_lo, 1+ε_hi)) + ½ max((V-R)², (V_clip-R)²) - c H

    dual=c: where A < 0 the loss is held below c|A| (verl: 3). kl_coef: β(log π_old - log π_ref) in
    the token rewards, adapted by kl_controller = fixed, horizon or doubling.

    Departures: whitening, value clip, dual clip and the ±20 bound on log r are not in the paper
    (which has γ = 0.99, λ = 0.95); γ = λ = 1 and the value clip 0.5 are verl's. Clipped shares
    count tokens whose clipped loss is the larger one.

    Reference: Schulman et al., arXiv:1707.06347 eq. 7; GAE arXiv:1506.02438; dual clip 1912.09729.
    """
    kl = kl_in_reward(coef=kl_coef, controller=kl_controller, target=kl_target, horizon=kl_horizon)
    return Recipe(
        reward=(kl,),
        advantage=gae(gamma=gamma, lam=lam, whitening=whitening),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual),
        regularisers=(entropy_bonus(coef=entropy_coef),) if entropy_coef else (),
        aggregate=token_mean(),
        value=value_loss(coef=value_coef, clip=value_clip, gamma=gamma, lam=lam),
    )
