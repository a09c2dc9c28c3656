"""Inner products of sequence gradients, never all of them held: F² and N² of ISOPO, K of ISOPO-NTK.

    F_i² = Σ_{j in J} ⟨V_i, G_j⟩² / Σ_{j in J} |G_j|²    N_i = |V_i|
    K_ij = ⟨V_i, V_j⟩                                      V_i = Σ_{t in i} G_t

Everything comes in a Gram form, which never builds V_i, and a materialised form, which does, block
by block; they agree to rounding and differ in cost (`cost.py`). Plain definitions: `lengths2` in
`isopo.py` and `kernel` in `ntk.py`.

Positions may lie on several ranks: then V_i is the sum of all their parts, on each of them.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from proxpo.gradients._engine.device import accumulator, matmul
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import (
    AnyGradients,
    Dense,
    OneHot,
    Outer,
    PositionGradients,
    at_positions,
    gathered,
)
from proxpo.ops.shapes import Bool, Float, Int, Tensor

# Entries of one block of Gram products or of stacked sequence gradients (64 MiB in float32).
BLOCK = 1 << 24
# The same for kernels: entries of a tile of Gram products (16 MiB in float32, what a GPU's cache
# holds), and bytes of a block of stacked sequence gradients.
TILE = 1 << 22
STACK = 1 << 28
_LONG = 1 << 16  # entries of V in one product at most
_FEW = 16  # groups whose kernels a GPU computes one after another
_HALVED = 256  # sequences from which V Vᵀ is computed in blocks, those below the diagonal left out


class OverlapSet:
    """The overlap set J: indices of positions, of any rank.

    Positions marked not `valid` (drawn from padding) count for nothing; `full` where it is known
    that there are none.
    """

    __slots__ = ("full", "index", "valid")

    def __init__(
        self, index: Int[Tensor, " pick"], valid: Bool[Tensor, " pick"], *, full: bool = False
    ) -> None:
        self.index = index
        self.valid = valid
        self.full = full

    def sum(self, x: Float[Tensor, "pick *any"]) -> Float[Tensor, "*any"]:
        """Σ_j x_j."""
        return x.sum(0) if self.full else self.valid.to(x.dtype) @ x

    @staticmethod
    def all(layout: Layout) -> "OverlapSet":
        """Every position."""
        whole = layout.whole
        index = torch.arange(whole.size, device=whole.seq.device)
        return OverlapSet(index, whole.valid, full=whole.known and not whole.padded)

    @staticmethod
    def at(index: Int[Tensor, " pick"], layout: Layout) -> "OverlapSet":
        """The positions `index`."""
        return OverlapSet(index, layout.whole.valid[index])

    def __len__(self) -> int:
        return self.index.numel()

    def blocks(self, size: int) -> "Iterator[OverlapSet]":
        """Yields parts of at most `size` positions."""
        for index, valid in zip(self.index.split(size), self.valid.split(size)):
            yield OverlapSet(index, valid, full=self.full)


def overlap_gram(
    rows: PositionGradients, layout: Layout, overlap_set: OverlapSet
) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
    """Σ_j ⟨V_i, G_j⟩² and Σ_j |G_j|² from inner products of positions alone."""
    size = max(1, BLOCK // layout.whole.size)
    if len(overlap_set) <= size and layout.alone and isinstance(rows, Outer):
        products = rows.overlap(overlap_set.index)
        own = products.gather(1, overlap_set.index[:, None])[:, 0]
        inner = layout.sum_columns(products)
        return overlap_set.sum(inner.square_()), overlap_set.sum(own)
    parts = []
    for block in overlap_set.blocks(size):
        picked = at_positions(rows, layout, block.index)
        products = rows.gram(picked)
        # ⟨G_j, G_j⟩ stands among the products, unless another rank has j.
        own = products.gather(1, block.index[:, None])[:, 0] if layout.alone else picked.squares()
        inner = layout.total(layout.sum_columns(products))
        parts.append((block.sum(inner.square()), block.sum(own)))
    tops, bottoms = zip(*parts)
    return sum(tops[1:], tops[0]), sum(bottoms[1:], bottoms[0])


def overlap_dense(
    rows: Dense, layout: Layout, sums: Float[Tensor, "row out"], overlap_set: OverlapSet
) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
    """Σ_j ⟨V_i, G_j⟩² and Σ_j |G_j|² from stacked V, for parameters that are vectors."""
    (picked,) = layout.fetch([rows.grads], overlap_set.index)
    picked = picked.to(sums.dtype)
    inner = picked @ sums.T
    own = picked.square_().sum() if overlap_set.full else overlap_set.sum(picked.square_().sum(1))
    return overlap_set.sum(inner.square_()), own


def length2(sums: Float[Tensor, "row *shape"]) -> Float[Tensor, " row"]:
    """|V_i|² without a buffer for the squares."""
    return torch.linalg.vector_norm(sums.flatten(1), dim=1).square()


def blocks_of(rows: Outer, layout: Layout) -> Iterator[tuple[slice, Float[Tensor, "row out inp"]]]:
    """Yields stacked V, some columns at a time, so that memory stays bounded.

    Callers pass `rows.tall`: cutting the longer side reads the other one seldom.
    """
    out, inp = rows.shape
    width = max(1, min(inp, BLOCK // max(1, layout.count * out)))
    for start in range(0, inp, width):
        columns = slice(start, min(start + width, inp))
        yield columns, rows.sums(layout, columns)


def materialised(
    rows: Outer, layout: Layout, overlap_set: OverlapSet | None
) -> tuple[Float[Tensor, " row"] | None, Float[Tensor, ""] | None, Float[Tensor, " row"]]:
    """Σ_j ⟨V_i, G_j⟩², Σ_j |G_j|² (both None without J) and N_i², building V in blocks."""
    inner: Tensor | None = None
    norm2: Tensor | None = None
    rows = rows.tall
    picked = None if overlap_set is None else at_positions(rows, layout, overlap_set.index)
    for columns, sums in blocks_of(rows, layout):
        part = length2(sums)
        norm2 = part if norm2 is None else norm2 + part
        if picked is not None:
            part = picked.project(sums, columns)
            inner = part if inner is None else inner + part
    assert norm2 is not None
    if overlap_set is None or picked is None or inner is None:
        return None, None, norm2
    return overlap_set.sum(inner.square()), overlap_set.sum(picked.squares()), norm2


def norm_gram(rows: Outer, layout: Layout) -> Float[Tensor, " row"]:
    """N_i² = Σ_{t,t' in i} (g_t·g_t')(a_t·a_t'), one sequence's positions against themselves."""
    rows, layout = gathered(rows, layout)
    g, a = layout.grid(rows.g, clear=True), layout.grid(rows.a, clear=False)
    step = max(1, BLOCK // max(1, g.shape[1] ** 2))
    shared = rows.inputs if len(g) <= step else None
    parts = []
    for gs, as_ in zip(g.split(step), a.split(step)):

        def compute(x: Tensor = as_) -> Tensor:
            return matmul(x, x.transpose(1, 2))

        products = compute() if shared is None else shared.once("norm", compute)
        parts.append(matmul(gs, gs.transpose(1, 2)).mul_(products).sum((1, 2)))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).clamp_(min=0)


def norm_pairs(rows: OneHot, layout: Layout) -> Float[Tensor, " row"]:
    """N_i² of an embedding: tokens that differ are orthogonal, so |Σ g|² per (sequence, token)."""
    rows, layout = gathered(rows, layout)
    sums, row, _ = rows.pairs(layout)
    squares = sums.grads.square().sum(1)
    return Layout(row, layout.count).sum_columns(squares[None])[0]


def norm_sketch(
    rows: Outer, layout: Layout, width: int, signs: Callable[[int, int], Tensor]
) -> Float[Tensor, " row"]:
    """N_i² ≈ |V_i Ω|², Ω random signs / √width: unbiased, relative deviation at most √(2/width).

    signs: draws a matrix of zeros and ones
    """
    rows = rows.tall
    drawn = signs(rows.a.shape[1], width)
    sketch = (2 * drawn - 1).to(accumulator(rows.a.dtype)) / width**0.5
    return materialised(rows.narrowed(sketch), layout, None)[2]


def kernel_gram(
    rows: Outer | OneHot, layout: Layout, groups: Groups
) -> Float[Tensor, "group member member"]:
    """K_ij = Σ_{t in i, t' in j} ⟨G_t, G_t'⟩ within each group, tile by tile, never building V.

    Products of bfloat16 factors are added in float32; a tile has at most TILE of them.
    """
    right = _factors(rows, layout, groups)
    left = right if layout.alone else _factors(*gathered(rows, layout), groups)
    size = groups.size
    length, own = (x[0].shape[1] // size for x in (left, right))  # positions of a sequence
    step = max(1, TILE // max(1, size * own))
    inner = left[0].new_zeros(groups.count, size * length, size, dtype=accumulator(rows.dtype))
    for some in _slices(groups.count, max(1, step // max(1, size * length))):
        for places in _slices(size * length, step):
            first = places.start // length  # K is symmetric: columns right of the diagonal will do
            products = _products(
                [x[some, places] for x in left], [x[some, first * own :] for x in right]
            )
            inner[some, places, first:] = products.unflatten(2, (size - first, own)).sum(3)
    return layout.total(_mirrored(inner.unflatten(1, (size, length)).sum(2)))


def _factors(rows: Outer | OneHot, layout: Layout, groups: Groups) -> list[Tensor]:
    """g (0 on padding) and a or the tokens, as (group, positions of its members, ...)."""
    g, a = (rows.g, rows.a) if isinstance(rows, Outer) else (rows.live, rows.ids[:, None])
    grids = layout.grid(g, clear=True), layout.grid(a, clear=False)
    return [groups.arranged(x).reshape(groups.count, -1, x.shape[2]) for x in grids]


def _products(left: list[Tensor], right: list[Tensor]) -> Float[Tensor, "group pos other"]:
    """⟨G_t, G_t'⟩ of positions on the left with positions on the right."""
    tokens = not left[1].is_floating_point()
    inner = _times(left[0], right[0])
    return inner.mul_(left[1] == right[1].mT if tokens else _times(left[1], right[1]))


def _times(
    x: Float[Tensor, "batch some inner"], y: Float[Tensor, "batch other inner"]
) -> Float[Tensor, "batch some other"]:
    """x yᵀ in float32 or better, without the copy of yᵀ that `matmul` makes of a batch on CPU."""
    if len(x) == 1:
        return matmul(x[0], y[0].T)[None]
    return torch.bmm(x, y.mT) if x.dtype == accumulator(x.dtype) else matmul(x, y.mT)


def _mirrored(kernel: Float[Tensor, "*group row row"]) -> Float[Tensor, "*group row row"]:
    """The symmetric matrix whose upper triangle is that of `kernel`."""
    return kernel.triu() + kernel.triu(1).mT


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def even_step(size: int, most: int) -> int:
    """Step of at most `most` through `size` columns: parts of like width, in multiples of 64.

    Products in half precision are several times slower for odd widths.
    """
    most = max(1, min(size, most))
    step = -(-size // -(-size // most))
    return min(-(-step // 64) * 64, most // 64 * 64 or most) if step < size else size


def kernel_stacked(
    sums: Float[Tensor, "group member entry"],
) -> Float[Tensor, "group member member"]:
    """K = V Vᵀ of the stacked sequence gradients of every group, added in float32 or better.

    In slices, each a product of its own: one dot product of millions is slow and less exact.
    """
    groups, size, entries = sums.shape
    on_gpu = sums.device.type == "cuda"
    if on_gpu and 1 < groups <= _FEW:  # each occupies the device by itself
        return torch.cat([kernel_stacked(own[None]) for own in sums])
    if groups > 1:
        length = min(_LONG, max(entries * groups // 256, 512)) if on_gpu else _LONG
        return functools.reduce(torch.add, (_times(x, x) for x in sums.split(length, 2)))
    length = _slice_length(size, entries, sums.device.type)
    whole = entries // length * length
    tiles = sums[0, :, :whole].unflatten(1, (-1, length)).transpose(0, 1)
    kernel = _upper(tiles).sum(0, keepdim=True)
    rest = sums[:, :, whole:]
    kernel = kernel + _times(rest, rest) if whole < entries else kernel
    return _mirrored(kernel) if size >= _HALVED else kernel


def _slice_length(size: int, entries: int, device: str) -> int:
    """Entries of V in one product: on CUDA, so that 256 tiles of 64 x 64 occupy the device."""
    if device != "cuda":
        return entries // max(1, entries // 8192)
    products = min(256 // ((size + 63) // 64) ** 2, entries // 512)
    products = max(1, products, -(-entries // _LONG))
    even = (n for n in range(products, products // 2, -1) if entries % (64 * n) == 0)
    length = entries // next(even, products)  # nothing is left over where that is possible
    return length if products == 1 else length // 64 * 64


def _upper(tiles: Float[Tensor, "tile row entry"]) -> Float[Tensor, "tile row row"]:
    """V Vᵀ of every tile; of many sequences, blocks below the diagonal are left out."""
    count = tiles.shape[1]
    if count < _HALVED:
        return _times(tiles, tiles)
    out = tiles.new_zeros(len(tiles), count, count, dtype=accumulator(tiles.dtype))
    for rows in _slices(count, _HALVED // 2):
        out[:, rows, rows.start :] = _times(tiles[:, rows], tiles[:, rows.start :])
    return out


def kernel_materialised(
    rows: Outer, layout: Layout, groups: Groups, *, kind: torch.dtype, held: bool = False
) -> tuple[Float[Tensor, "group member member"], Float[Tensor, "place out inp"] | None]:
    """K += V_blk V_blkᵀ over blocks of columns of STACK bytes; all of V at once if it is `held`.

    V is exact to its dtype `kind`, see `stack_dtype`; no other copy of a block exists.
    """
    if not held:  # cut the longer side, since the other one is read for every block
        rows = rows.tall
    out, inp = rows.shape
    width = inp if held else STACK // kind.itemsize // (groups.count * groups.size * out)
    g = groups.arranged(layout.grid(rows.g, clear=True)).mT
    a = groups.arranged(layout.grid(rows.a, clear=False))
    product = torch.bmm if kind == torch.bfloat16 else matmul
    kernel: Tensor | None = None
    for columns in _slices(inp, even_step(inp, width)):
        sums = layout.total(product(g, a[:, :, columns]))
        part = kernel_stacked(sums.view(groups.count, groups.size, -1))
        kernel = part if kernel is None else kernel.add_(part)
        if not held:
            del sums  # before the next block needs as much
    assert kernel is not None
    return kernel, sums if held else None


def stack_dtype(rows: Outer, layout: Layout, *, rounded: bool = True) -> torch.dtype:
    """Dtype of stacked V: float32 or better, or where it may be `rounded`, bfloat16 on CUDA.

    Sums over positions and over entries of V are taken in float32 either way. Rounding changes an
    entry of V by a factor 1 ± 2⁻⁹, so K_ij by at most 2⁻⁸ |V_i||V_j|; as roundings are independent,
    in general by about 2⁻⁸ |V_i||V_j| / √(O D).
    """
    low = rows.a.dtype == rows.g.dtype == torch.bfloat16
    kept = rounded and low and rows.a.is_cuda and layout.alone
    return torch.bfloat16 if kept else accumulator(rows.dtype)


def inner_with(rows: AnyGradients, direction: Tensor) -> Float[Tensor, " pos"]:
    """⟨D, G_t⟩ for every position and a D like the parameter: one product of the forward's size."""
    if isinstance(rows, Outer):
        through = matmul(rows.a, direction.T.to(rows.a.dtype))
        return (through * rows.g.to(through.dtype)).sum(1)
    if isinstance(rows, Dense):
        return rows.grads.to(direction.dtype) @ direction
    # D is 0 in the row of a padding token, which is never trained.
    return (direction[rows.ids] * rows.g.to(direction.dtype)).sum(1)
