"""Tokens that good and bad responses to a prompt share at their beginning and at their end."""

import torch

from proxpo.fields import declare_field
from proxpo.ops.groups import group_stats
from proxpo.ops.masked import is_packed, masked_mean, packing, row_mean
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken

declare_field(
    "conflict",
    "seq tok",
    doc="weight of tokens shared by good and bad responses; set by weights=conflict_tokens",
)


def conflict_runs(
    tokens: Int[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    group: Int[Tensor, " seq"],
    sign: Float[Tensor, " seq"],
) -> tuple[Int[Tensor, " seq"], Int[Tensor, " seq"]]:
    """Lengths of the leading and of the trailing run of conflict tokens of each response.

    A token is in conflict if a positive and a negative response of the group have it at the same
    place, counted in valid tokens from the first one, or from the last one for the trailing run.
    """
    length = mask.sum(dim=1, keepdim=True)
    step = torch.arange(mask.shape[1], device=mask.device)
    packed = tokens if is_packed(mask) else tokens.gather(1, packing(mask))
    reverse = packed.gather(1, (length - 1 - step).clamp(min=0))
    members, valid = _members(group), step < length
    ahead, behind = (_shared(x, valid, members, sign) for x in (packed, reverse))
    judged = (sign != 0).long()
    return judged * ahead.cumprod(1).sum(dim=1), judged * behind.cumprod(1).sum(dim=1)


def _members(group: Int[Tensor, " seq"]) -> Int[Tensor, "place seq"]:
    """For each row the rows of its group, one after another; small groups repeat their first."""
    order = group.argsort(stable=True)
    _, number, sizes = group[order].unique_consecutive(return_inverse=True, return_counts=True)
    start = sizes.cumsum(0) - sizes
    of_row = torch.empty_like(number).index_put((order,), number)
    place = torch.arange(int(sizes.max()) if len(sizes) else 0, device=group.device)[:, None]
    return order[start[of_row] + torch.where(place < sizes[of_row], place, 0)]


def _shared(
    aligned: Int[Tensor, "seq tok"],
    valid: Bool[Tensor, "seq tok"],
    members: Int[Tensor, "place seq"],
    sign: Float[Tensor, " seq"],
) -> Bool[Tensor, "seq tok"]:
    """True where responses of both signs have the token at its place."""
    good, bad = torch.zeros_like(valid), torch.zeros_like(valid)
    for other in members:
        same = (aligned == aligned[other]) & valid & valid[other]
        good |= same & (sign[other] > 0)[:, None]
        bad |= same & (sign[other] < 0)[:, None]
    return good & bad


def conflict_weights(
    batch: Batch, *, boost: float, divide: bool
) -> dict[str, Float[Tensor, "seq tok"]]:
    """λ for each token, from the sign of r_i - mean_g, or of the advantages without rewards."""
    if batch.rewards is None:
        sign = row_mean(batch.advantages, batch.mask).sign()
    else:
        stats = group_stats(batch.rewards, batch.group)
        gap = batch.rewards - stats.mean
        apart = stats.scored & (gap.abs() > 1e-6 * stats.std)  # at the mean up to rounding: neutral
        sign = torch.where(apart, gap, 0.0).sign()
    lead, trail = conflict_runs(batch.tokens, batch.mask, batch.group, sign)
    place, from_end = batch.mask.cumsum(1), batch.mask.flip(1).cumsum(1).flip(1)
    inside = torch.where(sign > 0, boost, 0.0).to(batch.logp.dtype)[:, None]
    weight = torch.where(place <= lead[:, None], inside, torch.ones_like(inside))
    weight = torch.where(from_end <= trail[:, None], weight * inside, weight)
    if divide:
        weight = weight / torch.maximum(lead, trail).clamp(min=1).to(weight.dtype)[:, None]
    return {"conflict": weight}


@stage("weights", needs=("tokens", "group"))
def conflict_tokens(*, boost: float = 2.0, divide: bool = False):
    """λ_it: `boost` in each conflict run of a positive response, 0 in those of a negative one.

    A token that a positive and a negative response of the group both have at the same place is in
    conflict; the leading run counts places from the start, the trailing run from the end. Where
    the runs overlap both factors apply. Responses at the group's mean keep λ = 1 and are not
    counted. divide=True also divides by max(1, |leading|, |trailing|), as the released code does.
    Found once per rollout. GTPO, arXiv:2508.03772.

    boost: weight of conflict tokens in positive responses
    divide: divide by the length of the runs, as released
    """
    check_numbers("conflict_tokens", "[0, inf)", boost=boost)

    def prepare(batch: Batch) -> dict[str, Tensor]:
        for name in ("tokens", "group"):
            batch.require(name, by="weights=conflict_tokens")
        return conflict_weights(batch, boost=boost, divide=divide)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        weight = batch.require("conflict", by="weights=conflict_tokens")
        return weight, {"weights/silenced": masked_mean(weight == 0, batch.mask)}

    return Parts(apply=weights, prepare=prepare)
