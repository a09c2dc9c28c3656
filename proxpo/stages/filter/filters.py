"""Filters on prompts, responses and tokens."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.groups import group_range, group_stats
from proxpo.ops.masked import row_max, row_mean, row_sum
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics

Keep = tuple[Bool[Tensor, "seq tok"], Metrics]


def informative_rows(batch: Batch) -> Bool[Tensor, " seq"]:
    """Rows of prompts answered both rightly and wrongly: 0 < #correct < G. A prompt alone is kept.

    `correct` decides where it is given, so that a length penalty cannot make a group informative;
    the rewards do otherwise.
    """
    group = batch.require("group", by="filter=informative")
    if batch.correct is not None:
        score = batch.correct.to(batch.logp.dtype)
    else:
        score = batch.require("rewards", by="filter=informative").to(batch.logp.dtype)
    stats = group_stats(score, group)
    bottom, top = group_range(score, group, stats.scored)
    return (top > bottom) | (stats.size == 1)


def check_redrawing(stage_name: str, generation_factor: int, max_rounds: int) -> None:
    """Refuses counts of a prompt filter that would draw nothing."""
    if generation_factor < 1 or max_rounds < 1:
        raise ProxpoError(
            f"{stage_name}: generation_factor and max_rounds are at least 1, got "
            f"{generation_factor}, {max_rounds}"
        )


@stage("filter", needs=("group",))
def informative():
    """Masks out prompts whose responses are all right or all wrong, without sampling others."""

    def keep(batch: Batch, ctx: Context) -> Keep:
        kept = informative_rows(batch)
        return kept[:, None].expand_as(batch.mask), {
            "filter/kept": kept.to(batch.logp.dtype).mean()
        }

    return keep


@stage("filter", needs=("truncated",))
def not_truncated():
    """Masks out responses cut at the length limit: DAPO's overlong filtering."""

    def keep(batch: Batch, ctx: Context) -> Keep:
        return ~batch.truncated[:, None].expand_as(batch.mask), {}

    return keep


@stage("filter", needs=("lag",))
def fresh_enough(*, max_lag: float):
    """Keeps a response only if no token is more than `max_lag` policy versions old (AReaL's η).

    max_lag: largest age of a token in policy versions
    """
    check_numbers("fresh_enough", "[0, inf]", max_lag=max_lag)

    def keep(batch: Batch, ctx: Context) -> Keep:
        oldest = row_max(batch.lag, batch.mask)
        return (oldest <= max_lag)[:, None].expand_as(batch.mask), {}

    return keep


@stage("filter", needs=("old_logp", "rollout_logp"))
def reject(
    *,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    statistic: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "seq_mean",
    threshold: str | float = "0.5_2.0",
):
    """Rejection mask on sampler mismatch, u = clamp(log π_old - log π_roll, ±20).

    k1 = -u, k2 = u²/2, k3 = e^u - 1 - u, taken per token or as the row's sum, mean or max. k2 and
    k3 are kept up to the threshold. For k1 the threshold "lo_hi" bounds the ratio π_roll/π_old
    (k1 is -u!), and one number h means "1/h_h". Rejected tokens leave every denominator.
    Several criteria: add the stage several times. verl's rollout correction.

    estimator: measure of the mismatch: k1, k2 or k3
    statistic: per token, or the response's sum, mean or largest
    threshold: bound, or for k1 a pair of bounds on the ratio, "0.5_2.0"
    """
    if statistic == "seq_max" and estimator == "k1":
        raise ProxpoError(f"reject: statistic '{statistic}' does not go with {estimator}")
    low, high = _bounds(estimator, threshold)

    def keep(batch: Batch, ctx: Context) -> Keep:
        u = (batch.old_logp - batch.rollout_logp).clamp(-20.0, 20.0)
        per_token = {"k1": lambda: -u, "k2": lambda: u.square() / 2, "k3": lambda: u.expm1() - u}
        value = _statistic(per_token[estimator](), batch.mask, statistic)
        kept = (value >= low) & (value <= high)
        return kept, {"filter/rejected": row_mean(~kept, batch.mask).mean()}

    return keep


def _bounds(estimator: str, threshold: str | float) -> tuple[float, float]:
    try:
        parts = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise ProxpoError(f"reject: threshold is a number or lo_hi, got '{threshold}'")
    if estimator != "k1":
        if len(parts) != 1:
            raise ProxpoError(f"reject: {estimator} takes one upper threshold, got '{threshold}'")
        check_numbers("reject", "[0, inf]", threshold=parts[0])
        return -math.inf, parts[0]
    low, high = parts if len(parts) == 2 else (1 / (parts[0] or math.inf), parts[0])
    if not 0 < low <= high:
        raise ProxpoError(f"reject: k1 needs ratio bounds 0 < lo ≤ hi, got '{threshold}'")
    return math.log(low), math.log(high)


def _statistic(
    value: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], statistic: str
) -> Float[Tensor, "seq tok"]:
    if statistic == "token":
        return value
    if statistic == "seq_max":
        rows = row_max(value, mask, floor=-torch.inf)
    else:
        rows = (row_sum if statistic == "seq_sum" else row_mean)(value, mask)
    return rows[:, None].expand_as(value)
