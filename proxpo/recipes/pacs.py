from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import signed_labels
from proxpo.stages.aggregate.labelled import labelled_scores
from proxpo.stages.ratio import log_ratio
from proxpo.stages.trust import plain_log_ratio
from proxpo.types import Recipe


@register("pacs", paper="arXiv:2509.02522")
def pacs(
    *,
    aggregate: Options = options_of(labelled_scores, "beta", "score", "eps"),
    advantage: Options = options_of(signed_labels),
    proxy: Literal["log_ratio", "mean_logp"] = "log_ratio",
) -> Recipe:
    """PACS: learn right and wrong as labels of a score made of the policy's own log-ratios.

        r̂_i = β Σ_t (log π - log π_old),   ψ_i = r̂_i - mean of the others' r̂ in the group
        L = (1/B) Σ_i w_i·BCE(σ(ψ_i), y_i),   w_i = n/(2·number with the label y_i), or 1

    The gradient flows through the baseline; no clip, no KL: the sigmoid saturates instead. The
    advantages shown are the signed weights ±w. score="standardised" divides by the group's std
    (on-policy by eps alone: a step a million times larger), "centred" does not, "plain" is r̂
    itself. proxy="mean_logp": r̂ = β·mean_t log π.

    proxy: score of a response: summed "log_ratio" to the old policy, or "mean_logp"

    Departures: padded positions are masked, which the released code leaves to luck. A prompt with
    one response is refused (singleton="drop": it gets no loss). The released actor never clips the
    gradient norm.

    Reference: arXiv:2509.02522; ritzz-ai/PACS.
    """
    return Recipe(
        advantage=signed_labels(**advantage),
        ratio=log_ratio(anchor="old" if proxy == "log_ratio" else "none"),
        trust=plain_log_ratio(),
        aggregate=labelled_scores(per="sum" if proxy == "log_ratio" else "mean", **aggregate),
    )
