from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.trust import balanced_clip
from proxpo.types import Recipe


@register("bapo", paper="arXiv:2510.18927")
def bapo(
    *,
    trust: Options = options_of(balanced_clip),
    dual: float | Literal["auto"] | None = "auto",
) -> Recipe:
    """BAPO: the clip bounds of each update are searched until positive tokens supply their share.

        P = Σ_{A>0} w min(r, c_high) A,   N = Σ_{A<0} w max(r, c_low) |A|
        L = (1/n) Σ max(-A r, -A clip(r, c_low, c_high))

    statistic="official": P/N ≥ 1, w = 1; c_low 0.6 → 0.8, then c_high 1.2 → 2.0, steps of 0.05, and
    a dual clip at 3. "paper": P/(P+N) ≥ 0.4, w = π_rollout; c_high 1.2 → 3.0 first, then c_low
    0.6 → 0.9 (steps 0.1 and 0.05 are ours, the paper's are unknown). "gradient", an extension:
    the share counts only tokens that still have a gradient, so that it answers to both bounds.

    Departures: in the first two a higher c_low makes N larger, away from the target, as published.
    Released code searches per micro-batch (scope="microbatch"); its example script has target=0.5,
    low_from=0.8, low_to=0.95, high_step=0.1. P/N ≥ τ is a share of τ/(1+τ).

    Reference: arXiv:2510.18927; WooooDyy/BAPO.
    """
    own = 3.0 if trust["statistic"] == "official" else None
    return Recipe(
        advantage=group_relative(),
        ratio=token(),
        trust=balanced_clip(dual=own if dual == "auto" else dual, **trust),
        aggregate=token_mean(),
    )
