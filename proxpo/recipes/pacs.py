from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import signed_labels
from proxpo.stages.aggregate.labelled import labelled_scores
from proxpo.stages.ratio import log_ratio as against_old
from proxpo.stages.trust import log_ratio
from proxpo.types import Recipe


@register("pacs", paper="arXiv:2509.02522")
def pacs(
    *,
    beta: float = 1.0,
    score: Literal["leave_one_out", "standardised", "centred", "plain"] = "leave_one_out",
    balance: Literal["question", "none", "only_positive", "only_negative"] = "question",
    proxy: Literal["log_ratio", "mean_logp"] = "log_ratio",
    singleton: Literal["refuse", "drop"] = "refuse",
    eps: float = 1e-6,
) -> Recipe:
    """PACS: learn right and wrong as labels of a score made of the policy's own log-ratios.

        r̂_i = β Σ_t (log π - log π_old),   ψ_i = r̂_i - mean of the others' r̂ in the group
        L = (1/B) Σ_i w_i·BCE(σ(ψ_i), y_i),   w_i = n/(2·number with the label y_i), or 1

    The gradient flows through the baseline; no clip, no KL: the sigmoid saturates instead. The
    advantages shown are the signed weights ±w. score="standardised" divides by the group's std
    (on-policy by eps alone: a step a million times larger), "centred" does not, "plain" is r̂
    itself. proxy="mean_logp": r̂ = β·mean_t log π.

    Departures: padded positions are masked, which the released code leaves to luck. A prompt with
    one response is refused (singleton="drop": it gets no loss). The released actor never clips the
    gradient norm.

    Reference: arXiv:2509.02522; ritzz-ai/PACS.
    """
    return Recipe(
        advantage=signed_labels(balance=balance, singleton=singleton),
        ratio=against_old(anchor="old" if proxy == "log_ratio" else "none"),
        trust=log_ratio(),
        aggregate=labelled_scores(
            beta=beta, score=score, per="sum" if proxy == "log_ratio" else "mean", eps=eps
        ),
    )
