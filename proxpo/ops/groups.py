"""Statistics over the responses to one prompt. Rows whose reward is missing (NaN) do not count."""

from typing import NamedTuple

import torch

from proxpo.fields import declare_field
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.types import AllSum, Batch

declare_field(
    "refresh",
    "seq",
    kind="bool",
    doc="1 where each update computes the advantage anew, because it follows the current policy; "
    "set by the recipe when it computes the advantages",
)


class GroupStats(NamedTuple):
    """Per row: its group's mean, standard deviation and number of scored rows; which are scored."""

    mean: Float[Tensor, " seq"]
    std: Float[Tensor, " seq"]
    size: Float[Tensor, " seq"]
    scored: Bool[Tensor, " seq"]


def group_stats(
    x: Float[Tensor, " seq"],
    group: Int[Tensor, " seq"],
    *,
    weight: Float[Tensor, " seq"] | None = None,
    unbiased: bool = True,
) -> GroupStats:
    """Weighted mean and (unbiased) standard deviation of each row's group, spread to its rows."""
    scored = ~x.isnan()
    filled = torch.where(scored, x, 0.0)
    share = scored.to(x.dtype) if weight is None else scored * weight.to(x.dtype)
    size = group_sum(scored.to(x.dtype), group)
    total = group_sum(share, group)
    mean = group_sum(share * filled, group) / total.clamp(min=torch.finfo(x.dtype).tiny)
    bottom, top = group_range(x, group, scored)
    mean = torch.where(top == bottom, top, mean)  # equal rewards centre to exactly 0
    squares = group_sum(torch.where(scored, (filled - mean).square(), 0.0), group)
    variance = squares / (size - 1 if unbiased else size).clamp(min=1)
    return GroupStats(mean, variance.sqrt(), size, scored)


def over_std(centred: Float[Tensor, "*row"], divisor: Tensor) -> Float[Tensor, "*row"]:
    """centred/divisor, a std + eps; 0 where the divisor is: equal rewards with eps = 0."""
    return torch.where(divisor > 0, centred / divisor, 0.0)


def group_range(
    x: Float[Tensor, " seq"], group: Int[Tensor, " seq"], counted: Bool[Tensor, " seq"]
) -> tuple[Float[Tensor, " seq"], Float[Tensor, " seq"]]:
    """Smallest and largest value among the counted rows of the same group, given to each of them.

    A group without any has ∞ and -∞.
    """
    _, index = group.unique(return_inverse=True)
    top, bottom = (torch.where(counted, values, -torch.inf) for values in (x, -x))
    return -_largest(bottom, index), _largest(top, index)


def _largest(x: Float[Tensor, " seq"], index: Int[Tensor, " seq"]) -> Float[Tensor, " seq"]:
    groups = int(index.max()) + 1 if len(index) else 0
    return x.new_full((groups,), -torch.inf).scatter_reduce(0, index, x, "amax")[index]


def group_sum(x: Float[Tensor, " seq"], group: Int[Tensor, " seq"]) -> Float[Tensor, " seq"]:
    """Σ over the rows of the same group, given to each of them."""
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    return x.new_zeros(groups).index_add(0, index, x)[index]


def refreshed(batch: Batch) -> Batch:
    """The batch marked for an advantage that follows the policy, its groups numbered from 0."""
    changes: dict[str, Tensor] = {"refresh": batch.mask.new_ones(len(batch.mask))}
    if batch.group is not None:
        changes["group"] = batch.group.unique(return_inverse=True)[1]
    return batch.replace(**changes)


def numbered(batch: Batch) -> Int[Tensor, " seq"]:
    """Groups counted from 0, as `group_sum_over_cuts` wants them.

    The batch of a live advantage has been prepared with such numbers, which its cuts keep; while it
    is prepared its groups are whole and may have any labels.
    """
    group = batch.require("group", by="a sum over groups")
    return group if batch.refresh is not None else group.unique(return_inverse=True)[1]


def group_sum_over_cuts(
    x: Float[Tensor, "seq col"], group: Int[Tensor, " seq"], *, all_sum: AllSum
) -> Float[Tensor, "seq col"]:
    """Σ over the rows of the same group in all micro-batches of this rank; groups count from 0."""
    most = group.max() + 1 if len(group) else group.sum()
    width = int(all_sum(most, "rank"))  # of one table for all: at least the largest of them
    return all_sum(x.new_zeros(width, x.shape[1]).index_add(0, group, x), "rank")[group]
