import math

from proxpo.recipes._registry import register
from proxpo.recipes.p3o import optional_terms
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import two_anchor_kl
from proxpo.stages.trust import two_anchor_ess_cap
from proxpo.types import Recipe, Scope


@register("p4o", paper="arXiv:2605.12380")
def p4o(
    *,
    ess_scope: Scope = "batch",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    eps: float = 1e-8,
) -> Recipe:
    """P4O: P3O with two anchors, the behaviour policy and a snapshot of the learner.

        ESS = min(ESS_b, ESS_p)
        L = (1/n) Σ [ -sg[min(r_b, ESS)]·A·log π + (1 - ESS)·KL(π‖π_mix) ]
        π_mix ∝ (1 - ESS_b)·π_b + (1 - ESS_p)·π_p

    π_b is `old_logp`, π_p is `prox_logp`, the learner at the first step of the epoch.

    Departures: none known; the paper reports that it collapses off-temperature where P3O does not.

    Reference: arXiv:2605.12380, figures 8-9.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=token(limit=math.inf),
        trust=two_anchor_ess_cap(scope=ess_scope),
        regularisers=(two_anchor_kl(scope=ess_scope), *optional_terms(kl_coef, entropy_coef)),
        aggregate=token_mean(),
    )
