import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.filter import fresh_enough
from proxpo.stages.ratio import token
from proxpo.stages.ratio.proximal import Proximal
from proxpo.stages.trust import ppo_clip
from proxpo.stages.weights import behaviour
from proxpo.types import Recipe


@register("decoupled-ppo", paper="arXiv:2505.24298")
def decoupled_ppo(
    *,
    prox: Proximal = "recompute",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float | None = None,
    weight: bool = True,
    weight_mode: Literal["clamp", "mask"] = "clamp",
    weight_level: Literal["token", "sequence", "geometric"] = "token",
    weight_cap: float = math.inf,
    max_lag: float | None = None,
) -> Recipe:
    """Decoupled PPO: clip against a recent proximal policy, correct for the older sampling policy.

        u = π/π_prox,   v = sg[π_prox/π_behaviour],   L = (1/N) Σ v · max(-A u, -A clip(u, 1±ε))

    π_behaviour is `old_logp`. prox="recompute" reads `prox_logp`; "a3po" interpolates it from the
    policy lag, log π_p = α log π_b + (1-α) sg[log π] with α = 1/d; "areal" and "linear" are the
    released code's variants. weight_cap with weight_mode clamp or mask bounds v. max_lag drops
    responses staler than that.

    Departures: the paper has no cap; AReaL applies v only when a rejection rule is configured
    (weight=False), and interpolates to π_b, not π, at d = 0 (prox="areal").

    Reference: Fu et al., arXiv:2505.24298 section 5.2; Hilton et al. 2110.00641; A-3PO 2512.06547.
    """
    correction = behaviour(prox=prox, mode=weight_mode, level=weight_level, cap=weight_cap)
    return Recipe(
        filter=() if max_lag is None else (fresh_enough(max_lag=max_lag),),
        advantage=group_relative(),
        weights=(correction,) if weight else (),
        ratio=token(anchor=prox),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual),
        aggregate=token_mean(),
    )
