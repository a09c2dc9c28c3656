"""Sums and means under a mask: the only place that divides by a mask."""

import math

import torch

from proxpo.ops.shapes import Bool, Float, Int, Shaped, Tensor
from proxpo.types import AllSum, Scope, local

_DEFAULT = torch.float64  # of counts


def masked_sum(x: Shaped[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"]) -> Float[Tensor, ""]:
    """Σ m x, whatever x holds where m = 0."""
    return _valid(x, mask).sum()


def masked_mean(
    x: Shaped[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    all_sum: AllSum = local,
    scope: Scope = "batch",
) -> Float[Tensor, ""]:
    """Σ m x / Σ m; 0 when nothing is valid."""
    total = count(x & mask) if x.dtype == torch.bool else masked_sum(x, mask)
    total, n = all_sum(torch.stack([total, count(mask).to(total.dtype)]), scope)
    return total / n.clamp(min=1)


def count(mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Number of true entries, in float64."""
    if mask.is_cuda:
        return mask.sum(dtype=_DEFAULT)
    return mask.count_nonzero().to(_DEFAULT)  # reads bytes; a sum on the CPU widens them first


def row_sum(x: Shaped[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"]) -> Float[Tensor, " seq"]:
    """Σ_t m x for each response."""
    return _valid(x, mask).sum(dim=1)


def row_mean(x: Shaped[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"]) -> Float[Tensor, " seq"]:
    """Σ_t m x / L for each response; 0 for an empty one."""
    valid = _valid(x, mask)
    return valid.sum(dim=1) / mask.sum(dim=1).clamp(min=1).to(valid.dtype)


def row_max(
    x: Shaped[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], *, floor: float = 0.0
) -> Shaped[Tensor, " seq"]:
    """The largest valid entry of each response, at least `floor`; `floor` for an empty one."""
    return torch.nn.functional.pad(torch.where(mask, x, floor), (1, 0), value=floor).amax(dim=1)


def row_quantile(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], q: float
) -> Float[Tensor, " seq"]:
    """Linearly interpolated quantile of each response's valid entries; 0 for an empty one."""
    if not x.shape[1]:
        return x.new_zeros(len(x))
    length = mask.sum(dim=1, keepdim=True)
    last = (length - 1).clamp(min=0)
    place = q * last.double()
    low = place.floor().long()
    high = torch.minimum(low + 1, last)
    below = math.floor(q * (x.shape[1] - 1)) + 2  # entries up to `high` in a row that is full
    upper = q >= 0.5  # the shorter end of each row is sorted, not all of it
    count_sorted = min(x.shape[1] + 2 - below if upper else below, x.shape[1])
    filled = torch.where(mask, x, -torch.inf if upper else torch.inf)
    ordered = filled.topk(count_sorted, dim=1, largest=upper).values
    start, end = (ordered.gather(1, last - at if upper else at) for at in (low, high))
    return torch.where(length > 0, torch.lerp(start, end, (place - low).to(x.dtype)), 0.0)[:, 0]


def spread(
    per_row: Float[Tensor, " seq"], mask: Bool[Tensor, "seq tok"]
) -> Float[Tensor, "seq tok"]:
    """One value per response, given to each of its valid tokens; 0 elsewhere."""
    return torch.where(
        mask, per_row[:, None], torch.zeros((), dtype=per_row.dtype, device=mask.device)
    )


def suffix_sum(
    x: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], *, discount: float = 1.0
) -> Float[Tensor, "seq tok"]:
    """R_t = x_t + discount · R_next over valid tokens; masked tokens are skipped, not counted."""
    valid = _valid(x, mask)
    if discount == 1.0:
        return _valid(valid.flip(1).cumsum(1).flip(1), mask)
    if is_packed(mask):
        return _valid(_discounted_suffix(valid, discount), mask)
    order = packing(mask)
    packed = _discounted_suffix(valid.gather(1, order), discount)
    return _valid(torch.empty_like(packed).scatter(1, order, packed), mask)


def is_packed(mask: Bool[Tensor, "seq tok"]) -> bool:
    """True if every row's valid tokens come first, without holes or padding on the left."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def packing(mask: Bool[Tensor, "seq tok"]) -> Int[Tensor, "seq tok"]:
    """Column order that puts each row's valid tokens first, in their order."""
    return mask.logical_not().to(torch.int8).argsort(dim=1, stable=True)


def _discounted_suffix(x: Float[Tensor, "seq tok"], discount: float) -> Float[Tensor, "seq tok"]:
    """Σ_{s≥t} discount^{s-t} x_s: one small matrix product per chunk, a carry between chunks."""
    rows, tokens = x.shape
    chunk = min(64, max(tokens, 1))
    count = -(-tokens // chunk)
    padded = torch.nn.functional.pad(x, (0, count * chunk - tokens)).view(rows, count, chunk)
    step = torch.arange(chunk, device=x.device)
    gap = step[None, :] - step[:, None]
    powers = torch.where(gap >= 0, discount ** gap.clamp(min=0).to(x.dtype), 0.0).to(x.dtype)
    out = padded @ powers.T
    to_next = discount ** (chunk - step).to(x.dtype)
    for c in range(out.shape[1] - 2, -1, -1):
        out[:, c] += to_next * out[:, c + 1, :1]
    return out.reshape(rows, count * chunk)[:, :tokens]


def last_valid(mask: Bool[Tensor, "seq tok"]) -> Bool[Tensor, "seq tok"]:
    """1 on the last valid token of each response."""
    after = mask.flip(1).cumsum(1).flip(1)
    return mask & (after == 1)


def moments(
    x: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    unbiased: bool = True,
    all_sum: AllSum = local,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean, variance and number of the valid entries. Sums run in float64; n = 1 has variance 0."""
    valid = _valid(x, mask).double()
    total, n = all_sum(torch.stack([valid.sum(), mask.sum().double()]))
    mean = total / n.clamp(min=1)
    squares = all_sum(masked_sum((valid - mean).square(), mask)[None])[0]
    variance = squares / (n - 1 if unbiased else n).clamp(min=1)
    return mean.to(x.dtype), variance.to(x.dtype), n.to(x.dtype)


def _valid(x: Tensor, mask: Tensor) -> Tensor:
    if not x.is_floating_point():
        x = x.to(_DEFAULT)
    return torch.where(mask, x, 0.0)


__all__ = [
    "count",
    "is_packed",
    "last_valid",
    "masked_mean",
    "masked_sum",
    "moments",
    "packing",
    "row_max",
    "row_mean",
    "row_quantile",
    "row_sum",
    "spread",
    "suffix_sum",
]
