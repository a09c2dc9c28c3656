from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.prompts import informative_prompts
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import covariance_penalty
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("kl-cov", paper="arXiv:2505.22617")
def kl_cov(*, share: float = 2e-3, coef: float = 1.0) -> Recipe:
    """KL-Cov: a penalty on |log-ratio| for the tokens of highest covariance, and no clip at all.

        L = (1/N) Σ [ -A r + β·1[Cov among the top max(1, ⌊kN⌋)]·|log π - log π_old| ]

    Departures: the paper writes KL(π_old‖π), the code the absolute log-ratio. k = 2e-3 is the 7B
    setting (2e-4 for 32B); the official option 0.2 is in percent; verl's coefficient is 0.1.

    Reference: Cui et al., arXiv:2505.22617 eqs 10, 13, 14.
    """
    return Recipe(
        prompts=(informative_prompts(),),
        advantage=group_relative(),
        ratio=token(),
        trust=unclipped(),
        regularisers=(covariance_penalty(share=share, coef=coef),),
        aggregate=token_mean(),
    )
