"""Log-probabilities of the current policy, alone or less the old ones, without exp."""

from typing import Literal

from proxpo.stages import Parts, stage
from proxpo.types import Batch, Context, PerToken


@stage("ratio", gives="ratio")
def current():
    """r_t = exp(log π - sg[log π]): 1 in value, with the gradient of log π; no old policy."""

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        return (batch.logp - batch.logp.detach()).exp(), {}

    return ratio


@stage("ratio", gives="log_ratio")
def log_ratio(*, anchor: Literal["old", "none"] = "old"):
    """log π - log π_old per token, or log π itself, for losses that compare whole responses.

    anchor: "old": less log π_old; "none": log π itself
    """

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        return (batch.logp - batch.old_logp.detach() if anchor == "old" else batch.logp), {}

    return Parts(apply=ratio, needs=("old_logp",) if anchor == "old" else ())
