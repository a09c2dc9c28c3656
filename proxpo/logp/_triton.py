"""The two tile functions of `_tile.py` as one Triton kernel each, in place. CUDA only."""

import torch
import triton
import triton.language as tl

from proxpo.logp._tile import FLOOR, SoftmaxStats, TokenGrads, Warp
from proxpo.ops.shapes import Float, Int, Tensor

_BLOCK = 4096
_FLOOR = tl.constexpr(FLOOR)


@triton.jit
def _warped(x, inverse_temperature, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x * inverse_temperature


@triton.jit
def _absorb_kernel(
    x, target, peak, total, picked, moment, cols, inverse_temperature, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(peak + row)
    s = tl.load(total + row)
    w = 0.0
    if ENTROPY:
        w = tl.load(moment + row)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < cols
        raw = tl.load(x + row * cols + col, mask=inside, other=0.0).to(tl.float32)
        z = _warped(raw, inverse_temperature, softcap, CAPPED)
        z = tl.where(inside, z, -float("inf"))
        new = tl.maximum(m, tl.max(z, 0))
        shifted = z - new
        shifted = tl.where(shifted < _FLOOR, _FLOOR, shifted)  # tl.maximum would swallow a NaN
        e = tl.exp(shifted)
        shrink = tl.exp(m - new)
        if ENTROPY:
            w = (w + s * (m - new)) * shrink + tl.sum(e * shifted, 0)
        s = s * shrink + tl.sum(e, 0)
        m = new
    tl.store(peak + row, m)
    tl.store(total + row, s)
    if ENTROPY:
        tl.store(moment + row, w)
    y = tl.load(target + row)
    here = (y >= 0) & (y < cols)
    raw = tl.load(x + row * cols + y, mask=here, other=0.0).to(tl.float32)
    z = _warped(raw, inverse_temperature, softcap, CAPPED)
    tl.store(picked + row, z, mask=here)


@triton.jit
def _logit_grad_kernel(
    x, target, logsumexp, d_logp, entropy, d_entropy, cols, inverse_temperature, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < cols
    place = x + row * cols + col
    z = _warped(
        tl.load(place, mask=inside, other=0.0).to(tl.float32), inverse_temperature, softcap, CAPPED
    )
    u = tl.load(d_logp + row)
    q = z - tl.load(logsumexp + row)
    force = u
    if ENTROPY:
        q = tl.where(q < _FLOOR, _FLOOR, q)
        force = u + tl.load(d_entropy + row) * (q + tl.load(entropy + row))
    g = tl.where(col == tl.load(target + row), u, 0.0) - tl.exp(q) * force
    slope = inverse_temperature
    if CAPPED:
        ratio = z / (inverse_temperature * softcap)
        slope = inverse_temperature * (1.0 - ratio * ratio)
    tl.store(place, (g * slope).to(x.dtype.element_ty), mask=inside)


def absorb(
    stats: SoftmaxStats, x: Float[Tensor, "tok col"], target: Int[Tensor, " tok"], warp: Warp
) -> SoftmaxStats:
    """`_tile.absorb`, updating `stats` in place."""
    rows, cols = x.shape
    entropic = stats.moment is not None
    with torch.cuda.device_of(x):
        _absorb_kernel[(rows,)](
            x, target, *stats[:3], stats.moment if entropic else stats.total,
            cols, 1.0 / warp.temperature, warp.softcap or 0.0,
            CAPPED=warp.softcap is not None, ENTROPY=entropic, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return stats


def logit_grad(
    x: Float[Tensor, "tok col"], target: Int[Tensor, " tok"], grads: TokenGrads, warp: Warp
) -> Float[Tensor, "tok col"]:
    """`_tile.logit_grad`, written over the tile."""
    rows, cols = x.shape
    entropic = grads.d_entropy is not None
    with torch.cuda.device_of(x):
        _logit_grad_kernel[(rows, triton.cdiv(cols, _BLOCK))](
            x, target, grads.logsumexp, grads.d_logp,
            grads.entropy if entropic else grads.d_logp,
            grads.d_entropy if entropic else grads.d_logp,
            cols, 1.0 / warp.temperature, warp.softcap or 0.0,
            CAPPED=warp.softcap is not None, ENTROPY=entropic, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return x
