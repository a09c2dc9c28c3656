from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import entropy_bonus, kl_convex
from proxpo.stages.schedule import reincarnation
from proxpo.stages.trust import mixed_clip
from proxpo.types import Recipe


@register("remix", paper="arXiv:2507.06892", confidence="paper formulas")
def remix(
    *,
    schedule: Options = options_of(reincarnation, "share", "window", "passes"),
    reset_at: int | None = 50,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.01,
    base_share: float | None = None,
    entropy_coef: float = 0.0,
) -> Recipe:
    """ReMix: rollouts of the last few policies reused, two KL anchors, and half-way a new base.

        r = π/π_{k-i},  c = π_k/π_{k-i};   x = max(-A r, -A clip(r, c±ε))
        L = (1/N) Σ [ x + β(λ KL(π‖π_base) + (1-λ) KL(π‖π_{k-1})) ]

    Each prompt comes from one of the last `window` rollouts with chance `share`, each batch is used
    `passes` times. At optimizer step `reset_at` the base becomes the present policy and the mixing
    ends. λ(t) = max(1 - 0.1⌈(t-50)⁺/10⌉, 0.5); base_share fixes it.

    Departures: no code was released. ε, β, the even draw among the last rollouts, whole prompts
    rather than single responses, the k3 estimate and the token mean are our choices.

    Reference: arXiv:2507.06892.
    """
    anchors = (kl_convex(coef=kl_coef, share=base_share),) if kl_coef else ()
    bonus = (entropy_bonus(coef=entropy_coef),) if entropy_coef else ()
    return Recipe(
        advantage=group_relative(),
        ratio=token(),
        trust=mixed_clip(clip_low=clip_low, clip_high=clip_high),
        regularisers=(*anchors, *bonus),
        aggregate=token_mean(),
        schedule=reincarnation(at=reset_at, **schedule),
    )
