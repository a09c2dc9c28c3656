from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import prompt_mean
from proxpo.stages.filter import informative
from proxpo.stages.ratio import token
from proxpo.stages.trust import clipped_weight
from proxpo.types import Recipe


@register("scalerl", paper="arXiv:2510.13786", confidence="paper formulas")
def scalerl(*, cap: float = 5.0, eps: float = 1e-6) -> Recipe:
    """ScaleRL: CISPO with an absolute cap, batch-scaled advantages and the mean over prompts.

        Â_i = (r_i - mean_g)/σ, σ the std of all centred rewards of the batch
        L = (1/P) Σ_g (1/N_g) Σ_{i∈g,t} -sg[min(π/π_roll, cap)] · Â · log π

    The ratio is to the sampler's log-probabilities. Prompts with equal rewards are dropped, not
    redrawn. Caps of 4, 5 and 8 made no significant difference in the paper.

    cap: largest weight of a token

    Departures: the removal of prompts with a pass rate of 0.9 and the fp32 head belong to the
    trainer, not to the loss.

    Reference: Khatri et al., arXiv:2510.13786, sections 3-4.
    """
    return Recipe(
        filter=(informative(),),
        advantage=group_relative(scale="centred", eps=eps),
        ratio=token(anchor="rollout"),
        trust=clipped_weight(clip_high=cap, absolute=True),
        aggregate=prompt_mean(),
    )
