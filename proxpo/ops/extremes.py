"""Largest and smallest entry of a batch that is cut over ranks, from sums alone."""

import torch

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


def _ordered(bits: Int[Tensor, ""]) -> Int[Tensor, ""]:
    """Integers in the order of the numbers that have these bits; its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


__all__ = ["batch_max", "batch_min"]
