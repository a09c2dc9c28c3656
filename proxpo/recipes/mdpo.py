import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import mirror_kl
from proxpo.stages.schedule import inner_steps
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("mdpo", paper="arXiv:2005.09814")
def mdpo(
    *,
    kl: Literal["sampled", "k3", "exact"] = "sampled",
    tsallis: float | None = None,
    step_size: float = 1.0,
    step_floor: float = 0.05,
    anneal: Literal["linear", "code", "constant"] = "linear",
    updates: int = 10,
) -> Recipe:
    """MDPO: several gradient steps on the ratio surrogate with a KL to the previous policy.

        L = (1/N) Σ [ -A r + (1/t_k)(r log r - r + 1) ],   t_k = max(1 - k/K, 0.05)

    The gradient -r(A - log r/t_k) is 0 exactly at the mirror step, log r = t_k A. Each rollout gets
    `updates` optimizer steps on the whole of it; k counts rollouts of K in the run, and where K is
    not known t stays at step_size. kl="exact" takes KL(π‖π_old) over
    the whole vocabulary, as the paper does for its actions; "k3" is biased on tokens of π_old.
    tsallis=q: differences of q-logarithms of the sampled token instead.

    Departures: written for continuous control with GAE advantages; here they are GRPO's. The floor
    of t_k is ours. The released schedule is 1 - (k-1)/K (anneal="code"). The off-policy variant,
    whose actor needs a critic Q, is left out.

    Reference: Tomar et al., arXiv:2005.09814 sections 4-5.
    """
    proximal = mirror_kl(
        estimator=kl, tsallis=tsallis, start=step_size, floor=step_floor, anneal=anneal
    )
    return Recipe(
        advantage=group_relative(),
        ratio=token(limit=math.inf),
        trust=unclipped(),
        regularisers=(proximal,),
        aggregate=token_mean(),
        schedule=inner_steps(steps=updates),
    )
