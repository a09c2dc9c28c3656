import math

from proxpo.recipes._registry import register
from proxpo.stages.advantage import entropy_penalised
from proxpo.stages.aggregate import seq_mean_token_mean, seq_sum_token_mean
from proxpo.stages.ratio import current
from proxpo.stages.trust import unclipped
from proxpo.stages.weights import conflict_tokens
from proxpo.types import Recipe


@register("gtpo", paper="arXiv:2508.03772")
def gtpo(
    *,
    gamma: float = 0.1,
    max_entropy: float | None = None,
    boost: float = 2.0,
    code_compat: bool = False,
) -> Recipe:
    """GTPO: tokens that good and bad responses share at their ends are never pushed down.

        A'_i = δ_i (r_i - mean_g - γ H_i),   δ_i = 1[H_i ≤ h], h = ln 2
        L = -(1/B) Σ_i (A'_i/L_i) Σ_t λ_it exp(log π - sg[log π])

    λ is `boost` on the leading and on the trailing run of conflict tokens of a positive response
    (boost² where they overlap), 0 on those of a negative one, 1 elsewhere. H_i is the response's
    mean entropy under the current policy; δ acts if the first batch of the run has a mean H of at
    most h. No clip, no KL, no std, no old policy. A response at its group's mean gets -γH.

    code_compat: compute as the released code

    Departures: code_compat=True is the released code: a sum over responses, each divided by
    max(1, longer run), δ always on, h = 0.7. Its optimizer: Adam with both betas 0.999999.

    Reference: arXiv:2508.03772; winstonsmith1897/GTPO. Other methods are called GTPO as well.
    """
    most = (0.7 if code_compat else math.log(2)) if max_entropy is None else max_entropy
    return Recipe(
        advantage=entropy_penalised(gamma=gamma, most=most, if_calm=not code_compat),
        weights=(conflict_tokens(boost=boost, divide=code_compat),),
        ratio=current(),
        trust=unclipped(),
        aggregate=seq_sum_token_mean() if code_compat else seq_mean_token_mean(),
    )
