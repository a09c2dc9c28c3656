from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.reinforce_pp import reinforce_pp
from proxpo.stages.advantage import discounted_return
from proxpo.stages.regularisers import kl_to_ref
from proxpo.types import Recipe


@register("reinforce-pp-baseline", paper="arXiv:2501.03262")
def reinforce_pp_baseline(
    *,
    kl_coef: float = 0.01,
    base: Options = options_of(reinforce_pp, "clip_low", "clip_high"),
    whiten_unbiased: bool = True,
) -> Recipe:
    """REINFORCE++-baseline: group-mean-centred rewards, then whitened over the whole batch.

        A'_i = r_i - mean_g r,   Â = (A' - μ)/σ over all valid tokens
        L = token mean of max(-Â r, -Â clip(r, 1±ε)) + λ·½(log π - log π_ref)²

    Departures: μ ≠ 0 in general, so a prompt with equal rewards gets Â = -μ/σ, not 0. verl has no
    KL term unless asked (kl_coef=0). A group of one keeps its raw reward, as in verl.

    Reference: Hu et al., arXiv:2501.03262v9, eqs 6-8.
    """
    return reinforce_pp(**base).replace(
        reward=(),
        advantage=discounted_return(
            baseline="group", whitening=True, whiten_unbiased=whiten_unbiased
        ),
        regularisers=(kl_to_ref(coef=kl_coef, estimator="k2"),) if kl_coef else (),
    )
