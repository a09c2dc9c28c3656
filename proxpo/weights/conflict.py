"""Tokens that good and bad responses to a prompt share at their beginning and at their end."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.groups import group_stats
from proxpo.masked import masked_mean, row_mean, row_sum
from proxpo.shapes import Bool, Float, Int, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics


class Runs(NamedTuple):
    """The leading and the trailing run of conflict tokens of each response."""

    leading: Bool[Tensor, "seq tok"]
    trailing: Bool[Tensor, "seq tok"]


def conflict_runs(
    tokens: Int[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    group: Int[Tensor, " seq"],
    sign: Float[Tensor, " seq"],
) -> Runs:
    """Positions whose token a positive and a negative response of the group both have there.

    Positions count valid tokens, from the first for the leading run and from the last for the
    trailing one; a run stops at the first token that is not in conflict.
    """
    place = mask.cumsum(1) - 1
    from_end = mask.flip(1).cumsum(1).flip(1) - 1
    ahead = mask & ~_shared(tokens, mask, place, group, sign)
    behind = mask & ~_shared(tokens, mask, from_end, group, sign)
    judged = mask & (sign != 0)[:, None]
    return Runs(judged & (ahead.cumsum(1) == 0), judged & (behind.flip(1).cumsum(1).flip(1) == 0))


def _shared(
    tokens: Tensor, mask: Tensor, place: Tensor, group: Tensor, sign: Tensor
) -> Bool[Tensor, "seq tok"]:
    """Whether the token occurs at this place in a response of each sign."""
    shared = torch.zeros_like(mask)
    if not mask.any():
        return shared
    ids = tokens[mask] - tokens[mask].min()
    prompt = group.unique(return_inverse=True)[1][:, None].expand_as(mask)[mask]
    key = (prompt * mask.shape[1] + place[mask]) * (ids.max() + 1) + ids
    _, number = key.unique(return_inverse=True)
    found = torch.zeros(int(number.max()) + 1, 2, dtype=torch.bool, device=mask.device)
    signs = sign[:, None].expand_as(mask)[mask]
    found[number[signs > 0], 0] = True
    found[number[signs < 0], 1] = True
    shared[mask] = found.all(dim=1)[number]
    return shared


def conflict_weights(
    batch: Batch, *, boost: float, divide: bool
) -> dict[str, Float[Tensor, "seq tok"]]:
    """λ for each token, from the sign of r_i - mean_g, or of the advantages without rewards."""
    if batch.rewards is None:
        sign = row_mean(batch.advantages, batch.mask).sign()
    else:
        stats = group_stats(batch.rewards, batch.group)
        sign = torch.where(stats.scored, batch.rewards - stats.mean, 0.0).sign()
    runs = conflict_runs(batch.tokens, batch.mask, batch.group, sign)
    inside = torch.where(sign > 0, boost, 0.0).to(batch.logp.dtype)[:, None]
    weight = torch.ones_like(batch.logp)
    for run in runs:
        weight = torch.where(run, weight * inside, weight)
    if divide:
        longest = torch.maximum(*(row_sum(run, batch.mask) for run in runs))
        weight = weight / longest.clamp(min=1).to(weight.dtype)[:, None]
    return {"conflict": weight}


def _prepare(options: Mapping[str, Any], batch: Batch) -> dict[str, Tensor]:
    for name in ("tokens", "group"):
        batch.require(name, by="weights=conflict_tokens")
    return conflict_weights(batch, boost=options["boost"], divide=options["divide"])


@stage("weights", needs=("tokens", "group"), prepare=_prepare)
def conflict_tokens(*, boost: float = 2.0, divide: bool = False):
    """λ_it: `boost` in each conflict run of a positive response, 0 in those of a negative one.

    A token that a positive and a negative response of the group both have at the same place is in
    conflict; the leading run counts places from the start, the trailing run from the end. Where
    the runs overlap both factors apply. Responses at the group's mean keep λ = 1 and are not
    counted. divide=True also divides by max(1, |leading|, |trailing|), as the released code does.
    Found once per rollout. GTPO, arXiv:2508.03772.
    """
    if not boost >= 0:
        raise ProxpoError(f"conflict_tokens: boost must not be negative, got {boost}")

    def weights(batch: Batch, ctx: Context) -> tuple[Float[Tensor, "seq tok"], Metrics]:
        found = batch.require("conflict", by="weights=conflict_tokens")
        return found, {"weights/silenced": masked_mean(found == 0, batch.mask)}

    return weights
