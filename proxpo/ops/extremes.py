"""Largest and smallest entry of a batch that is cut over ranks, from sums alone."""

import torch

from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.types import AllSum, Scope, local

DIGIT = 8  # bits looked at in one sum


def batch_max(
    x: Float[Tensor, " n"], *, all_sum: AllSum = local, scope: Scope = "batch"
) -> Float[Tensor, ""]:
    """Largest entry over all parts of the batch, exactly; 0 if no part has any.

    Ranks can only add, so the answer is built digit by digit: each part counts the leading digits
    of its candidates, the largest digit that any part counted is the next digit of the answer.
    """
    key = _ordered(x.double())
    answer = torch.zeros((), dtype=torch.int64, device=x.device)
    for place in range(64 - DIGIT, -1, -DIGIT):
        digit = (key >> place) & (2**DIGIT - 1)
        if place == 64 - DIGIT:
            digit = digit ^ 2 ** (DIGIT - 1)  # the sign bit: negative numbers come first
        counted = all_sum(torch.bincount(digit, minlength=2**DIGIT).double(), scope).nonzero()
        if not len(counted):
            return torch.zeros((), dtype=x.dtype, device=x.device)
        best = counted.max()
        key = key[digit == best]
        top = best ^ 2 ** (DIGIT - 1) if place == 64 - DIGIT else best
        answer = answer | (top << place)
    return _ordered(answer.view(torch.float64)).view(torch.float64).to(x.dtype)


def batch_min(x: Float[Tensor, " n"], *, all_sum: AllSum = local) -> Float[Tensor, ""]:
    """Smallest entry over all parts of the batch, exactly; 0 if no part has any."""
    return -batch_max(-x, all_sum=all_sum)


def _ordered(x: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Integers in the order of the numbers; its own inverse on the bits."""
    bits = x.view(torch.int64)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFFFFFFFFFF, bits)


__all__ = ["batch_max", "batch_min"]
