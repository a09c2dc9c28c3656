import math

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import entropy_bonus, ess_kl_from_old, kl_to_ref
from proxpo.stages.trust import ess_cap
from proxpo.types import Recipe, Scope


@register("p3o", paper="arXiv:2605.12380")
def p3o(
    *,
    ess_scope: Scope = "batch",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    eps: float = 1e-8,
) -> Recipe:
    """P3O: one statistic of the batch, its ESS, sets both the ceiling and the pull back.

        ESS = (Σ r)²/(Σ r² + 1e-8)/n,   r = π/π_old
        L = (1/n) Σ [ -sg[min(r, ESS)]·A·log π + (1 - ESS)·KL(π‖π_old) ]

    Fresh data has ESS = 1 and L is REINFORCE; stale data shrinks the first term and wakes the
    second, with no clip range and no coefficient to tune. No token's gradient is ever zeroed. The
    cap is ESS, never 1/ESS.

    Departures: the official code takes ESS per micro-batch over the ranks (ess_scope="microbatch"),
    the abstract says batch. The KL is the k3 estimate on tokens of π_old, exponent within ±10. A
    group of one keeps its raw reward.

    Reference: arXiv:2605.12380 eq. 11.
    """
    kl = (kl_to_ref(coef=kl_coef, clamp="p3o"),) if kl_coef else ()
    bonus = (entropy_bonus(coef=entropy_coef),) if entropy_coef else ()
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=token(limit=math.inf),
        trust=ess_cap(scope=ess_scope),
        regularisers=(ess_kl_from_old(scope=ess_scope), *kl, *bonus),
        aggregate=token_mean(),
    )
