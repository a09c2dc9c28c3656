from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.clip_cov import clip_cov
from proxpo.stages.regularisers import covariance_penalty
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("kl-cov", paper="arXiv:2505.22617")
def kl_cov(*, regularisers: Options = options_of(covariance_penalty)) -> Recipe:
    """KL-Cov: a penalty on |log-ratio| for the tokens of highest covariance, and no clip at all.

        L = (1/N) Σ [ -A r + β·1[Cov among the top max(1, ⌊kN⌋)]·|log π - log π_old| ]

    Departures: the paper writes KL(π_old‖π), the code the absolute log-ratio. k = 2e-3 is the 7B
    setting (2e-4 for 32B); the official option 0.2 is in percent; verl's coefficient is 0.1. N are
    the tokens of the optimizer step, in the code those of each micro-batch (scope="microbatch").

    Reference: Cui et al., arXiv:2505.22617 eqs 10, 13, 14.
    """
    return clip_cov().replace(trust=unclipped(), regularisers=(covariance_penalty(**regularisers),))
