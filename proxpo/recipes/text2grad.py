from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.ppo import ppo
from proxpo.stages.advantage import gae
from proxpo.stages.aggregate import guarded_token_mean, token_mean
from proxpo.stages.reward import kl_in_reward, span_reward
from proxpo.stages.value import value_loss
from proxpo.types import Recipe


@register("text2grad", paper="arXiv:2505.22338")
def text2grad(
    *,
    kl_coef: float = 0.2,
    kl: Literal["full", "k1", "abs", "k2", "k3"] = "full",
    kl_controller: Literal["fixed", "horizon", "doubling"] = "horizon",
    kl_target: float = 0.1,
    kl_horizon: float = 10000.0,
    ranges: Options = options_of(ppo, "clip_low", "clip_high"),
    gamma: float = 1.0,
    lam: float = 0.95,
    whitening: bool = True,
    value_coef: float = 0.1,
    value_clip: float | None = 0.2,
    entropy_coef: float = 0.0,
    holes: Literal["reset", "skip"] = "reset",
    max_ratio: float | None = 10.0,
    outcome: bool = False,
) -> Recipe:
    """Text2Grad: PPO on the spans that a critique in words has marked as good or bad.

        ρ_t = δ_t - β KL_t,   δ_t = +1, -1 or 0 inside a good span, a bad one, or none
        δV_t = ρ_t + γ V_{t+1} - V_t,   A_t = δV_t + γλ A_{t+1}, whitened over all valid tokens
        L = token mean of max(-A r, -A clip(r, 1±ε)) + c ½ max((V-R)², (V_clip-R)²)

    `proxpo.stages.reward.span_values` turns marked text into δ. No credit crosses a masked token
    (holes="skip": it does). A step whose mean ratio is above max_ratio counts for nothing.
    outcome=True adds the response's reward. entropy_coef is in the paper, not in the released
    trainer.

    KL_t is over the whole vocabulary (`ref_kl`), as in the scripts, or estimated from the sampled
    token ("k1", "abs", "k2"; "k3" is ours).

    Departures: the KL's target is per token. The released mask of punctuation is off by one token
    and not reproduced.

    Reference: arXiv:2505.22338; microsoft/Text2Grad.
    """
    base = ppo(**ranges, entropy_coef=entropy_coef)
    penalty = kl_in_reward(
        coef=kl_coef, estimator=kl, controller=kl_controller, target=kl_target, horizon=kl_horizon
    )
    critic = {"coef": value_coef, "clip": value_clip, "gamma": gamma, "lam": lam, "holes": holes}
    return base.replace(
        reward=(span_reward(outcome=outcome), penalty),
        advantage=gae(gamma=gamma, lam=lam, whitening=whitening, holes=holes),
        aggregate=token_mean() if max_ratio is None else guarded_token_mean(max_ratio=max_ratio),
        value=value_loss(**critic),
    )
