from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.prompts import informative_prompts
from proxpo.stages.ratio import token
from proxpo.stages.trust import clip_cov as clip_cov_trust
from proxpo.types import Recipe


@register("clip-cov", paper="arXiv:2505.22617")
def clip_cov(
    *,
    trust: Options = options_of(
        clip_cov_trust, "share", "cov_low", "cov_high", "keep_value", "scope"
    ),
    clip_low: float = 1.0,
    clip_high: float = 1.0,
) -> Recipe:
    """Clip-Cov: a few tokens whose log-probability and advantage co-vary lose their gradient.

        Cov_it = (A - Ā)(log π - mean log π);  max(1, ⌊κN⌋) random ones of
        {unclipped, ω_lo < Cov < ω_hi} drop out
        L = (1/N) Σ over the others of max(-A r, -A clip(r, 1-ε_lo, 1+ε_hi))

    Departures: the paper detaches the chosen tokens (keep_value=True), the code zeroes them: equal
    gradients. The clip is nearly off, [0, 2], as in their scripts (verl's default is 0.2). Chosen
    among the tokens of the whole optimizer step, where the code has each micro-batch and rank
    (scope="microbatch"); below 1/κ tokens the floor of one token acts.

    Reference: Cui et al., arXiv:2505.22617 eqs 10-12.
    """
    return Recipe(
        prompts=(informative_prompts(),),
        advantage=group_relative(),
        ratio=token(),
        trust=clip_cov_trust(clip_low=clip_low, clip_high=clip_high, **trust),
        aggregate=token_mean(),
    )
