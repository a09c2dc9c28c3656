"""ISOPO's small steps as few kernels (Triton, CUDA), and the solve of ISOPO-NTK.

Per linear layer: gather J, two thin GEMMs, `_overlap_kernel` (product, sum over each sequence,
square), `_scale_kernel` (reduce to F, form w, scale the narrower factor), the GEMM. Nothing comes
back to the host. `_weight` is `scale` of `isopo.py` with the exponent of F alone and no
regulariser, what most runs use: p and eps come from there. Plain forms: `inner_products.py`.
"""

import torch
import triton
import triton.language as tl

from proxpo.gradients._engine.device import matmul
from proxpo.gradients._engine.inner_products import OverlapSet
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import Dense, Outer
from proxpo.ops.shapes import Float, Tensor

_COLUMNS = 1024
_MAX_PICKS = 512
_MAX_ROWS = 128
MAX_KERNEL = 64  # sequences of a group whose kernel fits into the registers of one block


@triton.jit
def _weight(top, bottom, advantage, eps, half):
    """A (F² + eps)^(p/2), F² = top / bottom; A alone where nothing can be measured."""
    f2 = tl.where(bottom == 0.0, 0.0, top / tl.where(bottom == 0.0, 1.0, bottom))
    base = f2 + eps
    factor = tl.exp(half * tl.log(tl.where(base == 0.0, 1.0, base)))
    return f2, advantage.to(tl.float32) * tl.where(bottom == 0.0, 1.0, factor)


@triton.jit
def _overlap_kernel(
    gg, aa, seq, first, last, picks, out, size, count, BLOCK: tl.constexpr
):  # fmt: skip
    """out[j, i] = (Σ_{t in i} gg[j, t] aa[j, t])², out[j, count] = gg[j, j] aa[j, j]."""
    j, i = tl.program_id(0), tl.program_id(1)
    here = tl.load(picks + j)
    valid = tl.load(seq + here) >= 0
    begin, end = tl.load(first + i), tl.load(last + i) + 1
    row = j.to(tl.int64) * size
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = t < end
        mine = tl.load(seq + t, mask=inside, other=-1) == i
        g = tl.load(gg + row + t, mask=mine, other=0.0)
        total += g * tl.load(aa + row + t, mask=mine, other=0.0)
    inner = tl.where(valid, tl.sum(total, 0), 0.0)
    tl.store(out + j * (count + 1) + i, inner * inner)
    if i == 0:
        own = tl.load(gg + row + here) * tl.load(aa + row + here)
        tl.store(out + j * (count + 1) + count, tl.where(valid, own, 0.0))


@triton.jit
def _scale_kernel(
    x, out, overlaps, seq, first, advantages, f2s, weights, size, width, stride, number, count,
    eps, half, PICKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[t] = w[seq t] x[t]; the first position of a sequence also notes its F² and w."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < size
    i = tl.load(seq + t, mask=inside, other=-1)
    member = i >= 0
    i = tl.where(member, i, 0)
    j = tl.arange(0, PICKS)
    drawn = j < number
    bottom = tl.sum(tl.load(overlaps + j * (count + 1) + count, mask=drawn, other=0.0), 0)
    at = overlaps + j[None, :] * (count + 1) + i[:, None]
    top = tl.sum(tl.load(at, mask=drawn[None, :] & member[:, None], other=0.0), 1)
    f2, w = _weight(top, bottom, tl.load(advantages + i), eps, half)
    leads = member & (tl.load(first + i) == t)
    tl.store(f2s + i, f2, mask=leads)
    tl.store(weights + i, w, mask=leads)
    w = tl.where(member, w, 0.0)
    for start in range(0, width, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        keep = inside[:, None] & (c < width)[None, :]
        here = t[:, None].to(tl.int64)
        value = tl.load(x + here * stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        value = (value * w[:, None]).to(out.dtype.element_ty)
        tl.store(out + here * width + c[None, :], value, mask=keep)


@triton.jit
def _vector_kernel(
    grads, sums, seq, picks, out, width, stride, count, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[j, i] = (G_j · V_i)², out[j, count] = |G_j|²."""
    j, i = tl.program_id(0), tl.program_id(1)
    here = tl.load(picks + j).to(tl.int64)
    valid = tl.load(seq + here) >= 0
    inner = tl.zeros([COLUMNS], tl.float32)
    own = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        g = tl.load(grads + here * stride + c, mask=c < width, other=0.0).to(tl.float32)
        inner += g * tl.load(sums + i * width + c, mask=c < width, other=0.0)
        own += g * g
    product = tl.where(valid, tl.sum(inner, 0), 0.0)
    tl.store(out + j * (count + 1) + i, product * product)
    if i == 0:
        tl.store(out + j * (count + 1) + count, tl.where(valid, tl.sum(own, 0), 0.0))


@triton.jit
def _combine_kernel(
    sums, overlaps, advantages, f2s, weights, out, width, number, count, eps, half,
    PICKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = Σ_i w_i V_i."""
    block = tl.program_id(0)
    c = block * COLUMNS + tl.arange(0, COLUMNS)
    j = tl.arange(0, PICKS)
    drawn = j < number
    bottom = tl.sum(tl.load(overlaps + j * (count + 1) + count, mask=drawn, other=0.0), 0)
    total = tl.zeros([COLUMNS], tl.float32)
    for i in range(0, count):
        top = tl.sum(tl.load(overlaps + j * (count + 1) + i, mask=drawn, other=0.0), 0)
        f2, w = _weight(top, bottom, tl.load(advantages + i), eps, half)
        if block == 0:
            tl.store(f2s + i, f2)
            tl.store(weights + i, w)
        total += w * tl.load(sums + i * width + c, mask=c < width, other=0.0)
    tl.store(out + c, total.to(out.dtype.element_ty), mask=c < width)


@triton.jit
def _solve_kernel(
    kernel, average, advantages, weights, mean, places, size, number, rho, KNOWN: tl.constexpr,
    PAPER: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(K/c + I)⁻¹ A of one group in float64, by the sweep operator: no pivots are needed.

    The matrix stays symmetric, so that a step needs one of its rows and no column.
    """
    group = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, places, CHUNK):
        n = start + tl.arange(0, CHUNK)
        at = kernel + n // size * size * size + n % size * (size + 1)
        total += tl.load(at, mask=n < places, other=0.0).to(tl.float64)
    c = tl.sum(total, 0) / number
    if group == 0:
        tl.store(mean, c)
    if KNOWN:
        c = tl.load(average).to(tl.float64)
    c = c * rho
    safe = tl.where(c > 0, c, 1.0)
    i = tl.arange(0, SIZE)
    inside = i < size
    at = kernel + group * size * size + i[:, None] * size + i[None, :]
    k = tl.load(at, mask=inside[:, None] & inside[None, :], other=0.0).to(tl.float64)
    k = k / safe + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    x = tl.load(advantages + group * size + i, mask=inside, other=0.0).to(tl.float64)
    for step in range(0, size):
        swept = i == step
        row = tl.sum(tl.where(swept[:, None], k, 0.0), 0)
        pivot = tl.sum(tl.where(swept, row, 0.0), 0)
        row = tl.where(swept, -1.0, row)
        share = row / pivot
        x = tl.where(swept, 0.0, x) - share * tl.sum(tl.where(swept, x, 0.0), 0)
        k = tl.where(swept[:, None] | swept[None, :], 0.0, k) - row[:, None] * share[None, :]
    if PAPER:
        x = tl.where(c > 0, x / safe, 0.0)
    tl.store(weights + group * size + i, x.to(weights.dtype.element_ty), mask=inside)


def fits(layout: Layout, overlap_set: OverlapSet, kind: torch.dtype) -> bool:
    """True where these kernels handle a layer; the plain forms handle all."""
    small = len(overlap_set) <= _MAX_PICKS and layout.count <= _MAX_ROWS
    return small and kind != torch.float64 and layout.disjoint


def outer(
    rows: Outer,
    layout: Layout,
    overlap_set: OverlapSet,
    advantages: Float[Tensor, " row"],
    *,
    p: float,
    eps: float,
) -> tuple[Tensor, Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Σ_i A_i (F_i² + eps)^(p/2) V_i of a linear layer, with F² and the weights."""
    number, count = len(overlap_set), layout.count
    gg = matmul(rows.g.index_select(0, overlap_set.index), rows.g.T)
    aa = matmul(rows.a.index_select(0, overlap_set.index), rows.a.T)
    overlaps = gg.new_empty(number, count + 1)
    _overlap_kernel[(number, count)](
        gg, aa, layout.seq, layout.first, layout.last, overlap_set.index, overlaps, layout.size,
        count, BLOCK=1024,
    )  # fmt: skip
    # No position stores the weight of a sequence without any.
    stored = gg.new_zeros(2, count) if 0 in layout.lengths else gg.new_empty(2, count)
    narrow = rows.g if rows.g.shape[1] <= rows.a.shape[1] else rows.a
    narrow = narrow if narrow.stride(1) == 1 else narrow.contiguous()
    width = narrow.shape[1]
    scaled = torch.empty(narrow.shape, dtype=narrow.dtype, device=narrow.device)
    _scale_kernel[(triton.cdiv(layout.size, 8),)](
        narrow, scaled, overlaps, layout.seq, layout.first, advantages, stored[0], stored[1],
        layout.size, width, narrow.stride(0), number, count, eps, p / 2,
        PICKS=triton.next_power_of_2(number), ROWS=8,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
    )  # fmt: skip
    grad = scaled.T @ rows.a if rows.g.shape[1] <= rows.a.shape[1] else rows.g.T @ scaled
    return grad, stored[0], stored[1]


def dense(
    rows: Dense,
    layout: Layout,
    overlap_set: OverlapSet,
    advantages: Float[Tensor, " row"],
    *,
    p: float,
    eps: float,
) -> tuple[Tensor, Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Σ_i A_i (F_i² + eps)^(p/2) V_i of a vector: a bias or the weight of a norm."""
    grads = rows.grads if rows.grads.stride(1) == 1 else rows.grads.contiguous()
    number, count, width = len(overlap_set), layout.count, grads.shape[1]
    if layout.aligned and not layout.padded:
        sums = grads.view(count, -1, width).sum(1, dtype=torch.float32)
    else:
        sums = rows.sums(layout)
    overlaps = sums.new_empty(number, count + 1)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _vector_kernel[(number, count)](
        grads, sums, layout.seq, overlap_set.index, overlaps, width, grads.stride(0), count,
        COLUMNS=columns,
    )  # fmt: skip
    stored = sums.new_empty(2, count)
    grad = sums.new_empty(width)
    _combine_kernel[(triton.cdiv(width, 128),)](
        sums, overlaps, advantages, stored[0], stored[1], grad, width, number, count, eps, p / 2,
        PICKS=triton.next_power_of_2(number), COLUMNS=128,
    )  # fmt: skip
    return grad, stored[0], stored[1]


def solve(
    kernel: Float[Tensor, "group member member"],
    advantages: Float[Tensor, "group member"],
    average: Float[Tensor, ""] | None,
    *,
    rho: float,
    paper: bool,
    number: int,
) -> tuple[Float[Tensor, "group member"], Float[Tensor, ""]]:
    """The weights of ISOPO-NTK and tr K / m of `number` = m sequences, in one launch."""
    groups, size = advantages.shape
    weights, mean = torch.empty_like(advantages), kernel.new_empty(())
    _solve_kernel[(groups,)](
        kernel.contiguous(), kernel if average is None else average, advantages.contiguous(),
        weights, mean, groups * size, size, number, rho, KNOWN=average is not None, PAPER=paper,
        SIZE=triton.next_power_of_2(size), CHUNK=min(1024, triton.next_power_of_2(groups * size)),
        num_warps=1 if size <= 32 else 4,
    )  # fmt: skip
    return weights, mean
