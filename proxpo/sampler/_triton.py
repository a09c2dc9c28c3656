"""The functions of `_step.py` as Triton kernels. CUDA only."""

import torch
import triton
import triton.language as tl

from proxpo.ops.shapes import Float, Int, Num, Tensor
from proxpo.sampler._draw import Draw
from proxpo.sampler._step import PAGE, Paged, Parts
from proxpo.sampler._weights import Layer, Weights

_INNER = 1024  # columns of a program of `gated`
_VOCAB = 2048  # logits of a program of `draw_token`


@triton.jit
def _add_norm_kernel(
    x, more, weight, out, eps, DIM: tl.constexpr, ADDS: tl.constexpr, PAD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, PAD)
    inside = col < DIM
    place = row * DIM + col
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADDS:
        extra = tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + extra).to(x.dtype.element_ty)
        tl.store(x + place, value, mask=inside)
    value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
    w = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_kernel(x, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < INNER
    gate = tl.load(x + row * 2 * INNER + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + col, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * INNER + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_kernel(
    qkv, norm, cos, sin, pages, table, length, out, peaks, totals,
    plane, entries, positions, eps, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    NORMED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PAD_GROUP: tl.constexpr, PAD_WIDTH: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one part of the row's slots; part 0 has the new token itself."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    n = tl.load(length + row).to(tl.int32)

    col = tl.arange(0, PAD_WIDTH)
    inside = col < WIDTH
    turned = (col + WIDTH // 2) % WIDTH
    member = tl.arange(0, PAD_GROUP)
    real = (member < GROUP)[:, None] & inside[None, :]
    at = tl.minimum(n, positions - 1) * WIDTH + col
    c = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    base = qkv + row * (HEADS + 2 * KV) * WIDTH
    own = (head * GROUP + member)[:, None] * WIDTH
    key = (HEADS + head) * WIDTH
    q = tl.load(base + own + col[None, :], mask=real, other=0.0).to(tl.float32)
    q_turned = tl.load(base + own + turned[None, :], mask=real, other=0.0).to(tl.float32)
    k = tl.load(base + key + col, mask=inside, other=0.0).to(tl.float32)
    k_turned = tl.load(base + key + turned, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(base + key + KV * WIDTH + col, mask=inside, other=0.0)
    if NORMED:
        q_scale = (1.0 / tl.sqrt(tl.sum(q * q, 1) / WIDTH + eps))[:, None]
        k_scale = 1.0 / tl.sqrt(tl.sum(k * k, 0) / WIDTH + eps)
        q *= q_scale * tl.load(norm + own + col[None, :], mask=real, other=0.0).to(tl.float32)
        k *= k_scale * tl.load(norm + key + col, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(norm + own + turned[None, :], mask=real, other=0.0).to(tl.float32)
        q_turned *= q_scale * w
        w = tl.load(norm + key + turned, mask=inside, other=0.0).to(tl.float32)
        k_turned *= k_scale * w
    kind = pages.dtype.element_ty
    q_out = (q * c[None, :] + q_turned * s[None, :]).to(kind)
    k_out = (k * c + k_turned * s).to(kind)

    new_page = tl.load(table + row * entries + n // SLOTS).to(tl.int64)
    new = ((new_page * KV + head) * SLOTS + n % SLOTS) * WIDTH + col
    if split == 0:
        tl.store(pages + new, k_out, mask=inside)
        tl.store(pages + plane + new, v.to(kind), mask=inside)

    itself = tl.where(split == 0, 1.0, 0.0)
    score = tl.sum(q_out.to(tl.float32) * k_out.to(tl.float32)[None, :], 1) * scale
    peak = tl.where(split == 0, score, -float("inf"))
    total = tl.zeros([PAD_GROUP], tl.float32) + itself
    sums = tl.zeros([PAD_GROUP, PAD_WIDTH], tl.float32) + (v.to(tl.float32) * itself)[None, :]
    share = tl.cdiv(tl.cdiv(n, BLOCK), SPLITS) * BLOCK
    begin = split * share
    end = tl.minimum(n, begin + share)
    for start in range(begin, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = slot < end
        page = tl.load(table + row * entries + slot // SLOTS, mask=seen, other=0).to(tl.int64)
        place = ((page * KV + head) * SLOTS + slot % SLOTS)[:, None] * WIDTH + col[None, :]
        wanted = seen[:, None] & inside[None, :]
        keys = tl.load(pages + place, mask=wanted, other=0.0)
        values = tl.load(pages + plane + place, mask=wanted, other=0.0)
        scores = tl.dot(q_out, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(kind), values, input_precision="ieee")
        peak = higher

    if SPLITS == 1:
        o = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row * HEADS * WIDTH + own + col[None, :], o, mask=real)
    else:
        part = ((row * KV + head) * SPLITS + split) * PAD_GROUP + member
        tl.store(peaks + part, peak)
        tl.store(totals + part, total)
        tl.store(out + part[:, None] * PAD_WIDTH + col[None, :], sums)


@triton.jit
def _join_kernel(
    sums, peaks, totals, out,
    GROUP: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    PAD_GROUP: tl.constexpr, PAD_WIDTH: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one row and key head; part 0 is never empty."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    member = tl.arange(0, PAD_GROUP)
    col = tl.arange(0, PAD_WIDTH)
    part = (row * KV + head) * SPLITS * PAD_GROUP + member
    peak = tl.load(peaks + part)
    total = tl.load(totals + part)
    o = tl.load(sums + part[:, None] * PAD_WIDTH + col[None, :])
    for _ in range(1, SPLITS):
        part += PAD_GROUP
        other = tl.load(peaks + part)
        higher = tl.maximum(peak, other)
        shrink = tl.exp(peak - higher)
        grow = tl.exp(other - higher)
        total = total * shrink + tl.load(totals + part) * grow
        more = tl.load(sums + part[:, None] * PAD_WIDTH + col[None, :])
        o = o * shrink[:, None] + more * grow[:, None]
        peak = higher
    real = (member < GROUP)[:, None] & (col < WIDTH)[None, :]
    place = ((row * KV + head) * GROUP + member)[:, None] * WIDTH + col[None, :]
    tl.store(out + place, (o / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _mass_kernel(logits, temperature, peaks, totals, vocab, blocks, BLOCK: tl.constexpr):
    """Largest z/τ of a block of the vocabulary, and Σ exp(z/τ - it)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    col = block * BLOCK + tl.arange(0, BLOCK)
    tau = tl.load(temperature).to(tl.float32)
    z = tl.load(logits + row * vocab + col, mask=col < vocab, other=-float("inf")).to(tl.float32)
    z = z / tau
    peak = tl.max(z, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(totals + row * blocks + block, tl.sum(tl.exp(z - peak), 0))


@triton.jit
def _first_above(mass, edges, target, PAD: tl.constexpr):
    """First item with mass whose running sum exceeds `target`; the last with mass if none does."""
    item = tl.arange(0, PAD)
    above = tl.min(tl.where((edges > target) & (mass > 0.0), item, PAD), 0)
    return tl.where(above < PAD, above, tl.max(tl.where(mass > 0.0, item, 0), 0))


@triton.jit
def _pick_kernel(
    logits, temperature, u, peaks, totals, token, logp, vocab, blocks,
    BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The block at u · Σ mass, then the token inside it, as in `_draw._inverse_cdf`."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PAD)
    has = number < blocks
    own = tl.load(peaks + row * blocks + number, mask=has, other=-float("inf"))
    peak = tl.max(own, 0)
    total = tl.load(totals + row * blocks + number, mask=has, other=0.0)
    mass = tl.where(has, total * tl.exp(own - peak), 0.0).to(tl.float64)
    edges = tl.cumsum(mass, 0)
    whole = tl.sum(mass, 0)
    target = tl.load(u + row) * whole
    block = _first_above(mass, edges, target, PAD)
    width = tl.sum(tl.where(number == block, mass, 0.0), 0)
    before = tl.sum(tl.where(number == block, edges, 0.0), 0) - width
    inner_peak = tl.sum(tl.where(number == block, own, 0.0), 0)

    place = tl.arange(0, BLOCK)
    col = block * BLOCK + place
    tau = tl.load(temperature).to(tl.float32)
    z = tl.load(logits + row * vocab + col, mask=col < vocab, other=-float("inf")).to(tl.float32)
    z = z / tau
    inner = tl.exp(z - inner_peak).to(tl.float64)
    rest = (target - before) / width * tl.sum(inner, 0)
    item = _first_above(inner, tl.cumsum(inner, 0), rest, BLOCK)
    chosen = tl.sum(tl.where(place == item, z, 0.0), 0)
    tl.store(token + row, (block * BLOCK + item).to(tl.int64))
    tl.store(logp + row, chosen - peak - tl.log(whole.to(tl.float32)))


def add_norm(
    x: Float[Tensor, "row dim"],
    more: Float[Tensor, "row dim"] | None,
    weight: Float[Tensor, " dim"],
    eps: float,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "row dim"], Float[Tensor, "row dim"]]:
    """`_step.add_norm`; the sum is written over x."""
    rows, dim = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _add_norm_kernel[(rows,)](
        x, x if more is None else more, weight, out, eps,
        DIM=dim, ADDS=more is not None, PAD=triton.next_power_of_2(dim),
        num_warps=4 if dim <= 2048 else 8,
    )  # fmt: skip
    return x, out


def gated(x: Float[Tensor, "row two_inner"]) -> Float[Tensor, "row inner"]:
    """`_step.gated`."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    _gated_kernel[(rows, triton.cdiv(inner, _INNER))](x, out, INNER=inner, BLOCK=_INNER)
    return out


def attend(
    weights: Weights, layer: Layer, qkv: Float[Tensor, "row out"], cache: Paged, splits: int
) -> Float[Tensor, "row heads_width"]:
    """`_step.attend`; only slots that hold tokens are read."""
    pages, table, length = cache
    rows, heads, kv, width = len(qkv), weights.heads, weights.kv_heads, weights.width
    group, wide = (max(16, triton.next_power_of_2(n)) for n in (heads // kv, width))  # of tl.dot
    out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    peaks = totals = sums = out
    if splits > 1:
        peaks, totals = torch.empty(2, rows * kv * splits * group, device=qkv.device)
        sums = torch.empty(rows * kv * splits * group * wide, device=qkv.device)
    _attend_kernel[(rows, kv, splits)](
        qkv, weights.cos if layer.qk_norm is None else layer.qk_norm, weights.cos, weights.sin,
        pages, table, length, sums, peaks, totals,
        pages.stride(0), table.stride(0), len(weights.cos), weights.eps, width**-0.5,
        HEADS=heads, KV=kv, WIDTH=width, SLOTS=PAGE, NORMED=layer.qk_norm is not None,
        SPLITS=splits, BLOCK=64 if wide * pages.element_size() <= 256 else 32,
        PAD_GROUP=group, PAD_WIDTH=wide, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(rows, kv)](
            sums, peaks, totals, out, GROUP=heads // kv, KV=kv, WIDTH=width, SPLITS=splits,
            PAD_GROUP=group, PAD_WIDTH=wide, num_warps=4,
        )  # fmt: skip
    return out


def draw_token(
    logits: Float[Tensor, "row vocab"], u: Num[Tensor, " row"], temperature: Num[Tensor, " 1"]
) -> Draw:
    """`_step.draw_token`: one pass over the logits, then one over the chosen block."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _VOCAB)
    peaks, totals = torch.empty(2, rows, blocks, device=logits.device)
    token: Int[Tensor, " row"] = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logp = torch.empty(rows, device=logits.device)
    _mass_kernel[(rows, blocks)](
        logits, temperature, peaks, totals, vocab, blocks, BLOCK=_VOCAB, num_warps=4
    )
    _pick_kernel[(rows,)](
        logits, temperature, u, peaks, totals, token, logp, vocab, blocks,
        BLOCK=_VOCAB, PAD=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    return Draw(token, logp)


PARTS = Parts(add_norm, gated, attend, draw_token)
