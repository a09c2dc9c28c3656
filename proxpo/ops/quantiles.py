"""Quantiles of any number of entries."""

import math

import torch

from proxpo.ops.shapes import Float, Tensor


def quantile(x: Float[Tensor, " n"], q: float) -> Float[Tensor, ""]:
    """Linearly interpolated quantile, for any number of entries (torch.quantile stops at 2²⁴)."""
    ordered = x.sort().values
    place = q * (len(ordered) - 1)
    low = min(max(math.floor(place), 0), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


__all__ = ["quantile"]
