"""ISOPO's small steps as few kernels (Triton, CUDA), and the solve of ISOPO-NTK.

Per linear layer: gather J, two thin GEMMs (that of the inputs once for the layers that share
them), `_overlap_kernel` (product, sum over each sequence, square), `_scale_kernel` (reduce to F,
form w, scale the narrower factor), the GEMM. Nothing comes back to the host. `_weight` is `scale`
of `isopo.py`, whose options are constants of the compiled kernels. Plain forms:
`inner_products.py`.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from proxpo.gradients._engine.device import matmul
from proxpo.gradients._engine.inner_products import OverlapSet
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import Dense, Outer
from proxpo.logp.head import add_matmul_
from proxpo.ops.shapes import Float, Tensor

_COLUMNS = 1024
_MAX_PICKS = 512
_MAX_ROWS = 1024
MAX_KERNEL = 64  # sequences of a group whose kernel fits into the registers of one block


@triton.jit
def _factor(
    x2, mean, EXPONENT: tl.constexpr, RHO: tl.constexpr, OWN: tl.constexpr, EPS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """reg2(x)^k, reg2(x)² = x² + ρ E[x²] + ε, and 1 where that is 0."""
    base = x2 + EPS
    if RHO > 0:
        if OWN:  # noqa: SIM108
            unit = RHO * x2
        else:
            unit = RHO * tl.load(mean).to(tl.float32)
        base = x2 + unit + EPS
        if KEEP:
            base = tl.where(unit > 0, base / tl.where(unit > 0, unit, 1.0), 1.0)
    return tl.exp(EXPONENT / 2 * tl.log(tl.where(base == 0.0, 1.0, base)))


@triton.jit
def _ratio(top, bottom):
    """top / bottom, and 0 where the divisor is 0."""
    return tl.where(bottom == 0.0, 0.0, top / tl.where(bottom == 0.0, 1.0, bottom))


@triton.jit
def _weight(
    top, bottom, n2, advantage, mean_f, mean_n, mean_r,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    RHO_F: tl.constexpr, RHO_N: tl.constexpr, RHO_R: tl.constexpr,
    OWN_F: tl.constexpr, OWN_N: tl.constexpr, OWN_R: tl.constexpr,
    EPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """F², R² and A reg2(F)^p reg2(N)^q reg2(R)^r; F and R count for nothing where bottom is 0."""
    f2 = _ratio(top, bottom)
    r2 = _ratio(f2, n2)
    w = advantage.to(tl.float32)
    if P != 0:
        factor = _factor(f2, mean_f, P, RHO_F, OWN_F, EPS, KEEP)
        w = w * tl.where(bottom == 0.0, 1.0, factor)
    if Q != 0:
        w = w * _factor(n2, mean_n, Q, RHO_N, OWN_N, EPS, KEEP)
    if R != 0:
        factor = _factor(r2, mean_r, R, RHO_R, OWN_R, EPS, KEEP)
        w = w * tl.where(bottom == 0.0, 1.0, factor)
    return f2, r2, w


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
def _lengths(
    overlaps, norms, i, number, count, member, PICKS: tl.constexpr, F: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Σ_j ⟨V_i, G_j⟩², Σ_j |G_j|² and N_i² of some sequences; 0 what is not measured."""
    top = tl.zeros_like(i).to(tl.float32)
    bottom = tl.zeros_like(i).to(tl.float32)
    n2 = tl.zeros_like(i).to(tl.float32)
    if F:
        j = tl.arange(0, PICKS)
        drawn = j < number
        own = tl.load(overlaps + j * (count + 1) + count, mask=drawn, other=0.0)
        bottom += tl.sum(own, 0)
        at = overlaps + j[None, :] * (count + 1) + i[:, None]
        top += tl.sum(tl.load(at, mask=drawn[None, :] & member[:, None], other=0.0), 1)
    if N:
        n2 += tl.load(norms + i, mask=member, other=0.0)
    return top, bottom, n2


@triton.jit
def _scale_kernel(
    x, out, seq, first, overlaps, norms, mean_f, mean_n, mean_r, advantages, stored, size, width,
    stride, number, count,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    RHO_F: tl.constexpr, RHO_N: tl.constexpr, RHO_R: tl.constexpr,
    OWN_F: tl.constexpr, OWN_N: tl.constexpr, OWN_R: tl.constexpr,
    EPS: tl.constexpr, KEEP: tl.constexpr,
    F: tl.constexpr, N: tl.constexpr,
    PICKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[t] = w[seq t] x[t]; the first position of a sequence also stores its F², R² and w."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = t < size
    i = tl.load(seq + t, mask=inside, other=-1)
    member = i >= 0
    i = tl.where(member, i, 0)
    top, bottom, n2 = _lengths(overlaps, norms, i, number, count, member, PICKS, F, N)
    f2, r2, w = _weight(
        top, bottom, n2, tl.load(advantages + i), mean_f, mean_n, mean_r,
        P, Q, R, RHO_F, RHO_N, RHO_R, OWN_F, OWN_N, OWN_R, EPS, KEEP,
    )  # fmt: skip
    leads = member & (tl.load(first + i) == t)
    tl.store(stored + i, f2, mask=leads)
    tl.store(stored + count + i, r2, mask=leads)
    tl.store(stored + 2 * count + i, w, mask=leads)
    w = tl.where(member, w, 0.0)
    for start in range(0, width, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        keep = inside[:, None] & (c < width)[None, :]
        here = t[:, None].to(tl.int64)
        value = tl.load(x + here * stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
        value = (value * w[:, None]).to(out.dtype.element_ty)
        tl.store(out + here * width + c[None, :], value, mask=keep)


@triton.jit
def _combine_kernel(
    sums, overlaps, norms, mean_f, mean_n, mean_r, advantages, stored, out, width, number, count,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    RHO_F: tl.constexpr, RHO_N: tl.constexpr, RHO_R: tl.constexpr,
    OWN_F: tl.constexpr, OWN_N: tl.constexpr, OWN_R: tl.constexpr,
    EPS: tl.constexpr, KEEP: tl.constexpr,
    F: tl.constexpr, N: tl.constexpr,
    PICKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = Σ_i w_i V_i."""
    block = tl.program_id(0).to(tl.int64)
    c = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        member = i < count
        top, bottom, n2 = _lengths(overlaps, norms, i, number, count, member, PICKS, F, N)
        f2, r2, w = _weight(
            top, bottom, n2, tl.load(advantages + i, mask=member, other=0.0),
            mean_f, mean_n, mean_r, P, Q, R, RHO_F, RHO_N, RHO_R, OWN_F, OWN_N, OWN_R, EPS, KEEP,
        )  # fmt: skip
        if block == 0:
            tl.store(stored + i, f2, mask=member)
            tl.store(stored + count + i, r2, mask=member)
            tl.store(stored + 2 * count + i, w, mask=member)
        at = sums + i[:, None].to(tl.int64) * width + c[None, :]
        both = member[:, None] & (c < width)[None, :]
        value = tl.load(at, mask=both, other=0.0).to(tl.float32)
        total += tl.sum(w[:, None] * value, 0)
    tl.store(out + c, total.to(out.dtype.element_ty), mask=c < width)


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
def _solve_kernel(
    kernel, average, advantages, weights, mean, places, size, number, rho, KNOWN: tl.constexpr,
    PAPER: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(K/c + I)⁻¹ A of a parameter's group in float64, by the sweep operator: it needs no pivots.

    The matrix stays symmetric, so that a step needs one of its rows and no column.
    """
    group, parameter = tl.program_id(0), tl.program_id(1)
    kernel = kernel + parameter.to(tl.int64) * places * size
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, places, CHUNK):
        n = start + tl.arange(0, CHUNK)
        at = kernel + n // size * size * size + n % size * (size + 1)
        total += tl.load(at, mask=n < places, other=0.0).to(tl.float64)
    c = tl.sum(total, 0) / number
    if group == 0:
        tl.store(mean + parameter, c)
    if KNOWN:
        c = tl.load(average + parameter).to(tl.float64)
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
    at = weights + parameter * places + group * size + i
    tl.store(at, x.to(weights.dtype.element_ty), mask=inside)


def fits(layout: Layout, overlap_set: OverlapSet | None, kind: torch.dtype) -> bool:
    """True where these kernels handle a layer; the plain forms handle all."""
    picks = 0 if overlap_set is None else len(overlap_set)
    small = picks <= _MAX_PICKS and layout.count <= _MAX_ROWS
    return small and kind != torch.float64 and layout.disjoint


Means = tuple[Float[Tensor, ""] | None, ...]


@functools.lru_cache(maxsize=256)
def _constants(options: Any, own: tuple[bool, ...], norm: bool, picks: int) -> dict[str, float]:
    """Constants of the kernels; `own`: E[x²] of F, N, R is each sequence's own x²."""
    names = ("P", "Q", "R", "RHO_F", "RHO_N", "RHO_R", "OWN_F", "OWN_N", "OWN_R", "EPS", "KEEP")
    p, q, r, reg, eps, keep_small = options
    known = {"F": picks > 0, "N": norm, "PICKS": triton.next_power_of_2(max(1, picks))}
    return dict(zip(names, (p, q, r, *reg, *own, eps, keep_small))) | known


class Weighted(NamedTuple):
    """Σ_i w_i V_i (None where a total has it), and F², R² and w of every sequence."""

    grad: Tensor | None
    f2: Float[Tensor, " row"]
    r2: Float[Tensor, " row"]
    weights: Float[Tensor, " row"]


def weighted(
    rows: Outer | Dense,
    layout: Layout,
    overlap_set: OverlapSet | None,
    norm2: Float[Tensor, " row"] | None,
    sums: Float[Tensor, "row *shape"] | None,
    advantages: Float[Tensor, " row"],
    options: Any,
    means: Means,
    total: Float[Tensor, "out inp"] | None = None,
) -> Weighted:
    """Σ_i A_i s_i V_i of one parameter.

    sums: stacked V, of a vector or where it was built.
    total: tensor to which the sum is added, without `sums`.
    options, means: `ScaleOptions` of the rule, and E[x²] of F, N and R; None for each sequence's
        own x².
    """
    overlaps, count = None, layout.count
    if overlap_set is not None:
        if isinstance(rows, Outer):
            overlaps = _overlaps(rows, layout, overlap_set)
        else:
            assert sums is not None
            overlaps = _vector_overlaps(rows, sums, layout, overlap_set)
    # The kernels never read what is not measured; a restored average may still be on the host.
    pointers = [advantages if mean is None else mean.to(advantages.device) for mean in means]
    buffers = [advantages if x is None else x for x in (overlaps, norm2)] + pointers
    picks = 0 if overlaps is None else len(overlaps)
    own = tuple(mean is None for mean in means)
    constants = _constants(options, own, norm2 is not None, picks)
    # No position stores the weight of a sequence without any.
    make = torch.zeros if layout.has_empty and sums is None else torch.empty
    stored = make(3, count, device=advantages.device)
    if sums is not None:
        flat = sums.flatten(1)
        grad, width = torch.empty_like(flat[0]), flat.shape[1]
        columns = 128 if width <= 1 << 16 else 512
        _combine_kernel[(triton.cdiv(width, columns),)](
            flat, *buffers, advantages, stored, grad, width, picks, count,
            ROWS=4 if count <= 32 else 16, COLUMNS=columns, **constants,
        )  # fmt: skip
        return Weighted(grad.view(rows.shape), *stored.unbind())
    assert isinstance(rows, Outer)
    by_g = rows.g.shape[1] <= rows.a.shape[1]
    narrow = rows.g if by_g else rows.a
    narrow = narrow if narrow.stride(1) == 1 else narrow.contiguous()
    scaled = torch.empty(narrow.shape, dtype=narrow.dtype, device=narrow.device)
    size, width = narrow.shape
    _scale_kernel[(triton.cdiv(size, 8),)](
        narrow, scaled, layout.seq, layout.first, *buffers, advantages, stored, size, width,
        narrow.stride(0), picks, count, ROWS=8,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)), **constants,
    )  # fmt: skip
    factors = (scaled.T, rows.a) if by_g else (rows.g.T, scaled)
    if total is None:
        return Weighted(factors[0] @ factors[1], *stored.unbind())
    add_matmul_(total, *factors)
    return Weighted(None, *stored.unbind())


def _overlaps(
    rows: Outer, layout: Layout, overlap_set: OverlapSet
) -> Float[Tensor, "pick row_and_own"]:
    """⟨V_i, G_j⟩² of every j in J and sequence i, and |G_j|² in the last column."""
    index, count = overlap_set.index, layout.count
    gg = matmul(rows.g.index_select(0, index), rows.g.T)
    out = gg.new_empty(len(index), count + 1)
    block = min(1024, max(32, triton.next_power_of_2(layout.size // count)))
    _overlap_kernel[(len(index), count)](
        gg, rows.input_products(index), layout.seq, layout.first, layout.last, index, out,
        layout.size, count, BLOCK=block, num_warps=1 if block <= 128 else 4,
    )  # fmt: skip
    return out


def _vector_overlaps(
    rows: Dense, sums: Float[Tensor, "row out"], layout: Layout, overlap_set: OverlapSet
) -> Float[Tensor, "pick row_and_own"]:
    """The same for a vector, from stacked V."""
    grads = rows.grads if rows.grads.stride(1) == 1 else rows.grads.contiguous()
    count, width = sums.shape
    out = sums.new_empty(len(overlap_set), count + 1)
    _vector_kernel[(len(overlap_set), count)](
        grads, sums, layout.seq, overlap_set.index, out, width, grads.stride(0), count,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)),
    )  # fmt: skip
    return out


def solve(
    kernels: Float[Tensor, "parameter group member member"],
    advantages: Float[Tensor, "group member"],
    averages: Float[Tensor, " parameter"] | None,
    *,
    rho: float,
    paper: bool,
    number: int,
) -> tuple[Float[Tensor, "parameter group member"], Float[Tensor, " parameter"]]:
    """The weights of ISOPO-NTK and tr K / m of `number` = m sequences, in one launch."""
    groups, size = advantages.shape
    weights = advantages.new_empty(len(kernels), groups, size)
    means = kernels.new_empty(len(kernels))
    _solve_kernel[(groups, len(kernels))](
        kernels.contiguous(), kernels if averages is None else averages, advantages.contiguous(),
        weights, means, groups * size, size, number, rho, KNOWN=averages is not None, PAPER=paper,
        SIZE=triton.next_power_of_2(size), CHUNK=min(1024, triton.next_power_of_2(groups * size)),
        num_warps=1 if size <= 32 else 4,
    )  # fmt: skip
    return weights, means
