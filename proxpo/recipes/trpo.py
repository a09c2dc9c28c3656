import math

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_sum, token_mean
from proxpo.stages.ratio import token
from proxpo.stages.schedule import line_search
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("trpo", paper="arXiv:1502.05477", confidence="framework code")
def trpo(*, schedule: Options = options_of(line_search)) -> Recipe:
    """TRPO: the importance-weighted surrogate inside a ball of mean KL, one step per rollout.

        max Σ w r A   with   Σ w KL(π_old‖π) < δ,   w = 1/N per token
        (F + λI) x = g by conjugate gradients,   θ + αʲ √(2δ / xᵀ(F + λI)x) · x, j = 0, 1, ...

    The first point of the search with KL < δ and a larger surrogate is taken, else none: learning
    rate and optimizer play no part. It keeps the whole vocabulary's log-probabilities of a rollout:
    for small models and adapters. `inspect` shows the surrogate and its gradient.

    Departures: advantages are GRPO's. KL(old‖new) as in the paper (sb3 has new‖old); conjugate
    gradients start from 0 and stop at |g - (F + λI)x|² ≤ cg_tolerance · |g|², relative to g, so
    that the scale of the rewards is immaterial.

    Reference: Schulman et al., arXiv:1502.05477.
    """
    return Recipe(
        advantage=group_relative(),
        ratio=token(limit=math.inf),
        trust=unclipped(),
        aggregate=token_mean() if schedule["average"] == "token" else seq_mean_token_sum(),
        schedule=line_search(**schedule),
    )
