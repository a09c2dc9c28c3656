"""Ratios of a mixture of the current and the old policy."""

import math
from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.stages import stage
from proxpo.stages.ratio.sequence import sequence
from proxpo.stages.ratio.token import token
from proxpo.types import Batch, Context, PerToken


@stage("ratio", needs=("old_logp",), gives="ratio")
def smoothed(*, alpha: float = 0.1, level: Literal["token", "sequence"] = "token"):
    """r̃ = ((1-α) π + α π_old)/π_old = (1-α) r + α. PSPO, arXiv:2509.21282.

    Its gradient is (1-α) times that of r, for every token alike. level="sequence": r is GSPO's.

    alpha: share of the old policy in the mixture
    level: ratio of a "token", or GSPO's of the "sequence"
    """
    if not 0 <= alpha <= 1:
        raise ProxpoError(f"ratio=smoothed: alpha must be in [0, 1], got {alpha}")
    plain = token(limit=math.inf) if level == "token" else sequence()

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        r, metrics = plain.apply(batch, ctx)
        return (1 - alpha) * r + alpha, metrics

    return ratio
