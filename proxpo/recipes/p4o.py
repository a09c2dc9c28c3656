from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.p3o import p3o
from proxpo.stages.regularisers import two_anchor_kl
from proxpo.stages.trust import two_anchor_ess_cap
from proxpo.types import Recipe


@register("p4o", paper="arXiv:2605.12380")
def p4o(*, base: Options = options_of(p3o)) -> Recipe:
    """P4O: P3O with two anchors, the behaviour policy and a snapshot of the learner.

        ESS = min(ESS_b, ESS_p)
        L = (1/n) Σ [ -sg[min(r_b, ESS)]·A·log π + (1 - ESS)·KL(π‖π_mix) ]
        π_mix ∝ (1 - ESS_b)·π_b + (1 - ESS_p)·π_p

    π_b is `old_logp`, π_p is `prox_logp`, the learner at the first step of the epoch. Where that
    learner drew the rollout itself, at the temperature it trains at, the two are one: P3O. So it
    is with one update on each rollout, since π_p is then the policy that is trained.

    Departures: none known; the paper reports that it collapses off-temperature where P3O does not.

    Reference: arXiv:2605.12380, figures 8-9.
    """
    one_anchor, scope = p3o(**base), base["ess_scope"]
    _, *optional = one_anchor.regularisers
    return one_anchor.replace(
        trust=two_anchor_ess_cap(scope=scope),
        regularisers=(two_anchor_kl(scope=scope), *optional),
    )
