from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.aggregate import pairwise_logistic
from proxpo.stages.ratio import log_ratio_to_ref
from proxpo.stages.trust import plain_log_ratio
from proxpo.types import Recipe


@register("dpo", paper="arXiv:2305.18290", confidence="framework code")
def dpo(*, aggregate: Options = options_of(pairwise_logistic)) -> Recipe:
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
        trust=plain_log_ratio(),
        aggregate=pairwise_logistic(**aggregate),
    )
