"""Largest entries and quantiles of a batch that is cut over ranks or micro-batches, from sums."""

from typing import NamedTuple

import torch

from proxpo.ops.masked import count
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.types import AllSum, Scope, local

DIGIT = 16  # bits looked at in one sum
DIGITS = 2**DIGIT
BITS = {torch.float64: (torch.int64, 64), torch.float32: (torch.int32, 32)}


def batch_max(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    all_sum: AllSum = local,
    scope: Scope = "batch",
) -> Float[Tensor, ""]:
    """Largest valid entry over all parts of the batch, exactly; 0 if no part has any.

    Ranks can only add, so the answer is built digit by digit: each part marks the leading digit of
    its own largest entry, the largest digit that any part marked is the next digit of the answer,
    and the parts that have it go on.
    """
    if not x.numel():
        x, mask = x.new_zeros(1), mask.new_zeros(1)
    largest, going = torch.where(mask, x, -torch.inf).max(), mask.any()
    kind, bits = BITS[x.dtype]
    key, lowest = _ordered(largest.view(kind)), torch.iinfo(kind).min  # negative numbers first
    key = (key ^ lowest).long()
    every = torch.arange(DIGITS, device=x.device)
    answer = torch.zeros_like(key)
    for place in range(bits - DIGIT, -1, -DIGIT):
        digit = (key >> place) & (DIGITS - 1)
        marked = all_sum(((every == digit) & going).double(), scope)
        best = torch.where(marked > 0, every, 0).max()
        going = going & (digit == best)
        answer = answer | (best << place)
    there = marked.amax() > 0
    found = _ordered(answer.to(kind) ^ lowest).view(x.dtype)
    return torch.where(there, found, 0.0)


def batch_min(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, all_sum: AllSum = local
) -> Float[Tensor, ""]:
    """Smallest valid entry over all parts of the batch, exactly; 0 if no part has any."""
    return -batch_max(-x, mask, all_sum=all_sum)


class Ranked(NamedTuple):
    """Entries by rank: their values, how many entries are larger, and how many are equal."""

    value: Float[Tensor, " rank"]
    above: Float[Tensor, " rank"]
    equal: Float[Tensor, " rank"]


def ranked(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    rank: Float[Tensor, " rank"],
    *,
    all_sum: AllSum = local,
) -> Ranked:
    """The valid entries of these ranks over all parts of the batch, exactly; 1 is the largest.

    Digit by digit: the parts add up how many of their entries, among those that agree with the
    answer so far, have each leading digit; the digit at which the count from above reaches the rank
    is the next one.
    """
    kind, bits = BITS[x.dtype]
    lowest = torch.iinfo(kind).min
    key = (_ordered((x.detach()[mask] + 0.0).view(kind)) ^ lowest).long()  # -0 and 0 are one number
    rank = rank.to(key.device, torch.float64)
    left, answer = rank, torch.zeros_like(rank, dtype=torch.int64)
    agrees = torch.ones(len(rank), len(key), dtype=torch.float64, device=key.device)
    equal = torch.zeros_like(rank)
    for place in range(bits - DIGIT, -1, -DIGIT):
        digit = (key >> place) & (DIGITS - 1)
        counts = agrees.new_zeros(len(rank), DIGITS).index_add(1, digit, agrees)
        counts = all_sum(counts)
        from_above = counts.flip(1).cumsum(1).flip(1)
        best = ((from_above >= left[:, None]).sum(1, keepdim=True) - 1).clamp(min=0)
        equal = counts.gather(1, best)[:, 0]
        left = left - (from_above.gather(1, best)[:, 0] - equal)
        agrees = agrees * (digit == best)
        answer = answer | (best[:, 0] << place)
    value = _ordered(answer.to(kind) ^ lowest).view(x.dtype)
    return Ranked(value, rank - left, equal)


def top_share(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], k: int, *, all_sum: AllSum = local
) -> Float[Tensor, "seq tok"]:
    """1 on the k largest valid entries over all parts of the batch, 0 elsewhere.

    Entries that tie for the last places share them in equal parts, so that no cut of the batch and
    no order of its rows changes the choice.
    """
    last = ranked(x, mask, x.new_full((1,), k, dtype=torch.float64), all_sum=all_sum)
    share = ((k - last.above) / last.equal.clamp(min=1)).to(x.dtype)
    chosen = torch.where(x > last.value, 1.0, torch.where(x == last.value, share, 0.0))
    return torch.where(mask, chosen, 0.0).to(x.dtype)


def batch_quantile(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], q: float, *, all_sum: AllSum = local
) -> Float[Tensor, ""]:
    """Linearly interpolated quantile of the valid entries over all parts of the batch."""
    n = all_sum(count(mask))
    place = q * (n - 1).clamp(min=0)
    low = place.floor()
    from_above = torch.stack([n - low, n - torch.minimum(low + 1, (n - 1).clamp(min=0))])
    value = ranked(x, mask, from_above, all_sum=all_sum).value
    return torch.lerp(value[0], value[1], (place - low).to(x.dtype))


def _ordered(bits: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Integers in the order of the numbers that have these bits; its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


__all__ = ["batch_max", "batch_min", "batch_quantile", "ranked", "top_share"]
