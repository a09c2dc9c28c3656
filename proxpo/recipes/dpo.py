from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.aggregate import pairwise_logistic
from proxpo.stages.ratio import log_ratio_to_ref
from proxpo.stages.trust import log_ratio
from proxpo.types import Recipe


@register("dpo", paper="arXiv:2305.18290", confidence="framework code")
def dpo(
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    form: Literal["sigmoid", "robust", "ipo"] = "sigmoid",
    ipo_mean: bool = True,
) -> Recipe:
    """DPO: a logistic loss on the difference of policy/reference log-ratios of a preference pair.

        h = Σ_t log π/π_ref (chosen) - Σ_t log π/π_ref (rejected),   L = mean_pairs -log σ(β h)

    The pair of a prompt is its best and its worst response by reward; prompts with equal rewards
    give none. form="robust" and "ipo", label_smoothing: see aggregate=pairwise_logistic.

    Departures: none for the sigmoid; IPO averages log-ratios over tokens in TRL (ipo_mean=True) and
    sums them in OpenRLHF.

    Reference: Rafailov et al., arXiv:2305.18290 eq. 7.
    """
    return Recipe(
        ratio=log_ratio_to_ref(),
        trust=log_ratio(),
        aggregate=pairwise_logistic(
            beta=beta, label_smoothing=label_smoothing, form=form, ipo_mean=ipo_mean
        ),
    )
