"""Products accumulated in float32 or better, sums in one order, and the state of recording."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from proxpo.ops.shapes import Float, Int, Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums of products: float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y for 2-D or batched 3-D operands, accumulated and returned in float32 or better."""
    kind = accumulator(x.dtype)
    if x.dim() == 3 and not x.is_cuda:
        y = y.contiguous()  # batched products of a transposed operand are several times slower
    if x.dtype == kind:
        return x @ (y if y.dtype == kind else y.to(kind))
    if x.is_cuda and x.dtype == y.dtype:
        product = torch.bmm if x.dim() == 3 else torch.mm
        return product(x, y, out_dtype=kind)
    return x.to(kind) @ y.to(kind)


def sum_by(
    x: Float[Tensor, "any out"], slot: Int[Tensor, " any"], count: int
) -> Float[Tensor, "slot out"]:
    """Σ of the rows of each slot, in one order on a GPU too, where index_add's varies."""
    return torch.ops.aten.embedding_dense_backward(x, slot, count, -1, False)


_RECORDERS: list[None] = []


@contextmanager
def recording() -> Iterator[None]:
    """Counts what runs in the block as recorded, by whatever recorder."""
    _RECORDERS.append(None)
    try:
        yield
    finally:
        _RECORDERS.pop()


def capturing() -> bool:
    """True while operations are recorded: no value can be read from the device then."""
    in_graph = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return in_graph or bool(_RECORDERS)
