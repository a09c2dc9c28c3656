"""The functions of `_pieces.py` and their gradients as Triton kernels. CUDA only.

Arithmetic in float32, results rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from proxpo.ops.shapes import Float, Tensor

_INNER = 1024  # columns of a program of `gated`
_HEADS = 8  # heads of a program of `turned`


@triton.jit
def _turn_kernel(
    x, cos, sin, out, stride, places,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """y_j = x_j cos_j + x_k sin_j, k = j rolled by half the width; backward, sin_k instead."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, PAD)
    rolled = (col + WIDTH // 2) % WIDTH
    inside = (head < HEADS)[:, None] & (col < WIDTH)[None, :]
    table = (row % places) * WIDTH
    c = tl.load(cos + table + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    at = rolled if BACK else col
    s = tl.load(sin + table + at, mask=col < WIDTH, other=0.0).to(tl.float32)
    start = x + row * stride + head[:, None] * WIDTH
    value = tl.load(start + col[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + rolled[None, :], mask=inside, other=0.0).to(tl.float32)
    y = value * c[None, :] + other * s[None, :]
    place = row * HEADS * WIDTH + head[:, None] * WIDTH + col[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(gate, up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < INNER
    g = tl.load(gate + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    y = g * tl.sigmoid(g) * u
    tl.store(out + row * INNER + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward_kernel(
    gate, up, slope, to_gate, to_up, stride, out_stride, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < INNER
    g = tl.load(gate + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(slope + row * INNER + col, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(g)
    from_gate = d * u * open_ * (1.0 + g * (1.0 - open_))
    place = row * out_stride + col
    tl.store(to_gate + place, from_gate.to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_up + place, (d * g * open_).to(to_up.dtype.element_ty), mask=inside)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    tokens, heads, width = x.shape
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    block = min(_HEADS, triton.next_power_of_2(heads))
    _turn_kernel[(tokens, triton.cdiv(heads, block))](
        x, cos, sin, out, x.stride(0), len(cos),
        HEADS=heads, WIDTH=width, BACK=back, BLOCK=block, PAD=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


def _grid(gate: Tensor) -> tuple[int, int]:
    return len(gate), triton.cdiv(gate.shape[1], _INNER)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _gated_kernel[_grid(gate)](gate, up, out, gate.stride(0), INNER=gate.shape[1], BLOCK=_INNER)
    return out


def _gate_back(gate: Tensor, up: Tensor, slope: Tensor, to_gate: Tensor, to_up: Tensor) -> None:
    _gated_backward_kernel[_grid(gate)](
        gate, up, slope.contiguous(), to_gate, to_up, gate.stride(0), to_gate.stride(0),
        INNER=gate.shape[1], BLOCK=_INNER,
    )  # fmt: skip


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _turn(slope, *ctx.saved_tensors, back=True), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(gate, up)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        _gate_back(gate, up, slope, to_gate, to_up)
        return to_gate, to_up


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gate(*x.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        to_x = torch.empty_like(x)
        gate, up = x.chunk(2, dim=-1)
        _gate_back(gate, up, slope, *to_x.chunk(2, dim=-1))
        return to_x


def turned(
    x: Float[Tensor, "tok heads width"],
    cos: Float[Tensor, "place width"],
    sin: Float[Tensor, "place width"],
) -> Float[Tensor, "tok heads width"]:
    """Rotary embedding, in the precision of x."""
    return _Turned.apply(x, cos.contiguous(), sin.contiguous())


def gated(
    gate: Float[Tensor, "tok inner"], up: Float[Tensor, "tok inner"]
) -> Float[Tensor, "tok inner"]:
    """silu(gate) · up."""
    return _Gated.apply(gate.contiguous(), up.contiguous())


def gated_halves(x: Float[Tensor, "tok two_inner"]) -> Float[Tensor, "tok inner"]:
    """`gated` of the first half of the columns and the second."""
    return _GatedHalves.apply(x.contiguous())
