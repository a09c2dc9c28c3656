"""The parts of a Llama block between its matrix products; on CUDA a kernel each way."""

import functools
import importlib
from types import ModuleType

import torch
from torch.nn.functional import silu

from proxpo.ops.shapes import Float, Tensor


def turned(
    x: Float[Tensor, "tok heads width"],
    cos: Float[Tensor, "place width"],
    sin: Float[Tensor, "place width"],
) -> Float[Tensor, "tok heads width"]:
    """Rotary embedding: x cos + roll(x) sin, `sin` with the sign of rotate-half.

    The tables are repeated where there are more tokens than places.
    """
    if (kernels := _kernels(x)) is not None:
        return kernels.turned(x, cos, sin)
    places = x.unflatten(0, (-1, len(cos)))
    rolled = places.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(places * cos[:, None], rolled, sin[:, None]).flatten(0, 1)


def gated(
    gate: Float[Tensor, "tok inner"], up: Float[Tensor, "tok inner"]
) -> Float[Tensor, "tok inner"]:
    """silu(gate) · up."""
    kernels = _kernels(gate)
    return silu(gate) * up if kernels is None else kernels.gated(gate, up)


def gated_halves(x: Float[Tensor, "tok two_inner"]) -> Float[Tensor, "tok inner"]:
    """`gated` of the first half of the columns and the second."""
    if (kernels := _kernels(x)) is not None:
        return kernels.gated_halves(x)
    return gated(*x.chunk(2, dim=-1))


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels, where they apply."""
    return _triton() if x.is_cuda and x.dtype != torch.float64 else None


@functools.cache
def _triton() -> ModuleType | None:
    """The module of kernels, where Triton is installed."""
    try:
        return importlib.import_module("proxpo.sampler._pieces_triton")
    except ImportError:
        return None
