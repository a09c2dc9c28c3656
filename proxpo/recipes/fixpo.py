import math
from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import entropy_bonus, kl_dual
from proxpo.stages.schedule import fixup
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("fixpo", paper="arXiv:2312.05405")
def fixpo(
    *,
    regularisers: Options = options_of(kl_dual, "radius", "margin", "statistic", "kl"),
    beta: float = 1.0,
    beta_lr: float = 0.01,
    fixup_every: Literal["epoch", "last"] = "epoch",
    fixup_rows: int = 1024,
    max_fixup_passes: int = 100,
    entropy_coef: float = 0.0,
) -> Recipe:
    """FixPO: a KL penalty with a Lagrange multiplier, and after each epoch steps on the KL alone.

        L = (1/N) Σ [ -r A + β KL(π_old‖π) ],   β ← Adam on β·(ε - C max KL),  β ≥ 0
        fix-up: descend β·mean KL on every part with max KL > ε, until one pass finds none

    The KL is exact over the vocabulary (vocab_logp, old_vocab_logp), so the region holds on every
    token of the rollout. kl="sampled" needs neither and guarantees nothing.

    Departures: advantages are GRPO's and there is no critic. The released loop has no end; here
    max_fixup_passes bounds it, after which the last weights inside the region come back.

    Reference: Zentner et al., arXiv:2312.05405.
    """
    penalty = kl_dual(coef=beta, lr=beta_lr, **regularisers)
    return Recipe(
        advantage=group_relative(),
        ratio=token(limit=math.inf),
        trust=unclipped(),
        regularisers=(penalty, entropy_bonus(coef=entropy_coef)) if entropy_coef else (penalty,),
        aggregate=token_mean(),
        schedule=fixup(every=fixup_every, rows=fixup_rows, max_passes=max_fixup_passes),
    )
