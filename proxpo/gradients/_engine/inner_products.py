"""Inner products of sequence gradients, never all of them held: F² and N² of ISOPO, K of ISOPO-NTK.

    F_i² = Σ_{j in J} ⟨V_i, G_j⟩² / Σ_{j in J} |G_j|²    N_i = |V_i|
    K_ij = ⟨V_i, V_j⟩                                      V_i = Σ_{t in i} G_t

Everything comes in a Gram form, which never builds V_i, and a materialised form, which does, block
by block; they agree to rounding and differ in cost (`cost.py`). Plain definitions: `lengths2` in
`isopo.py` and `kernel` in `ntk.py`.

Positions may lie on several ranks: then V_i is the sum of all their parts, on each of them.
"""

from collections.abc import Iterator

import torch

from proxpo.gradients._engine.device import accumulator, matmul
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
    rows: Outer, layout: Layout, width: int, generator: torch.Generator | None = None
) -> Float[Tensor, " row"]:
    """N_i² ≈ |V_i Ω|², Ω random signs / √width: unbiased, relative deviation at most √(2/width)."""
    rows = rows.tall
    kind, device = accumulator(rows.a.dtype), rows.a.device
    signs = torch.randint(0, 2, (rows.a.shape[1], width), generator=generator, device=device)
    sketch = (2 * signs - 1).to(kind) / width**0.5
    return materialised(rows.narrowed(sketch), layout, None)[2]


def kernel_gram(rows: PositionGradients, layout: Layout) -> Float[Tensor, "row row"]:
    """K_ij = Σ_{t in i, t' in j} ⟨G_t, G_t'⟩, never building V."""
    kernel: Tensor | None = None
    for block in OverlapSet.all(layout).blocks(max(1, BLOCK // layout.whole.size)):
        inner = layout.sum_columns(rows.gram(at_positions(rows, layout, block.index)))
        part = layout.whole.take(block.index).sum_rows(inner)
        kernel = part if kernel is None else kernel + part
    assert kernel is not None
    return layout.total(kernel)


def kernel_stacked(sums: Float[Tensor, "row *shape"]) -> Float[Tensor, "row row"]:
    """K = V Vᵀ of stacked sequence gradients, in slices: one dot product of millions is slow."""
    flat = sums.reshape(sums.shape[0], -1)
    slices = max(1, flat.shape[1] // 8192)
    whole = flat.shape[1] // slices * slices
    tiles = flat[:, :whole].unflatten(1, (slices, -1)).transpose(0, 1)
    kernel = torch.bmm(tiles, tiles.transpose(1, 2)).sum(0)
    return kernel + flat[:, whole:] @ flat[:, whole:].T if whole < flat.shape[1] else kernel


def kernel_materialised(rows: Outer, layout: Layout) -> Float[Tensor, "row row"]:
    """K += V_blk V_blkᵀ over blocks of columns: exact, memory bounded."""
    kernel: Tensor | None = None
    for _, sums in blocks_of(rows.tall, layout):
        part = kernel_stacked(sums)
        kernel = part if kernel is None else kernel + part
    assert kernel is not None
    return kernel


def kernel_pairs(rows: OneHot, layout: Layout) -> Float[Tensor, "row row"]:
    """K of an embedding: sums over (sequence, token), then products between equal tokens."""
    if not layout.alone:  # pairs of one rank would have to be matched with those of the others
        return kernel_gram(rows, layout)
    sums, row, token = rows.pairs(layout)
    return kernel_gram(OneHot(token, sums.grads, rows.size), Layout(row, layout.count))


def inner_with(rows: AnyGradients, direction: Tensor) -> Float[Tensor, " pos"]:
    """⟨D, G_t⟩ for every position and a D like the parameter: one product of the forward's size."""
    if isinstance(rows, Outer):
        through = matmul(rows.a, direction.T.to(rows.a.dtype))
        return (through * rows.g.to(through.dtype)).sum(1)
    if isinstance(rows, Dense):
        return rows.grads.to(direction.dtype) @ direction
    # D is 0 in the row of a padding token, which is never trained.
    return (direction[rows.ids] * rows.g.to(direction.dtype)).sum(1)
