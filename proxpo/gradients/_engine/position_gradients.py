"""Position gradients G_t of one parameter, in the three shapes they come in.

    Outer   G_t = g_t a_tᵀ        weights of linear layers (a = 1 column picked by a token: OneHot)
    Dense   G_t itself            biases and the weights of norms
    OneHot  G_t = e_id(t) g_tᵀ    embeddings

Each offers inner products ⟨G_j, G_t⟩, sums over sequences and the weighted sum Σ_t w_t G_t, so
that a method is written once for all parameters. Sequence gradients are V_i = Σ_{t in i} G_t.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from proxpo.gradients._engine.device import accumulator, matmul, sum_by
from proxpo.gradients._engine.layout import Layout
from proxpo.logp.head import add_matmul_
from proxpo.ops.shapes import Float, Int, Tensor


@runtime_checkable
class PositionGradients(Protocol):
    """Position gradients of one parameter, and the products a method may ask of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        ...

    @property
    def positions(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def gram(self, picked: Any) -> Float[Tensor, "pick pos"]:
        """⟨G_j, G_t⟩ for every position j of `picked`, of the same kind, and every t."""
        ...

    def squares(self) -> Float[Tensor, " pos"]:
        """|G_t|²."""
        ...

    def reduce(self, weights: Float[Tensor, " pos"]) -> Tensor:
        """Σ_t w_t G_t, shaped like the parameter."""
        ...


@dataclass(frozen=True)
class Outer:
    """G_t = g_t a_tᵀ; the parameter is O x D."""

    a: Float[Tensor, "pos inp"]
    g: Float[Tensor, "pos out"]
    inputs: "SharedInput | None" = None  # where other layers multiply the same `a`

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.g.shape[1], self.a.shape[1])

    @property
    def positions(self) -> int:
        return self.a.shape[0]

    @property
    def device(self) -> torch.device:
        return self.a.device

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    def gram(self, picked: "Outer") -> Float[Tensor, "pick pos"]:
        return matmul(picked.g, self.g.T).mul_(matmul(picked.a, self.a.T))

    def overlap(self, index: Int[Tensor, " pick"]) -> Float[Tensor, "pick pos"]:
        """⟨G_j, G_t⟩ for the positions j of J, all on this rank, and every t."""
        products = matmul(self.g.index_select(0, index), self.g.T)
        return products.mul_(self.input_products(index))

    def input_products(self, index: Int[Tensor, " pick"]) -> Float[Tensor, "pick pos"]:
        """a_j·a_t for the positions j of J; other layers may read them too."""

        def compute() -> Tensor:
            return matmul(self.a.index_select(0, index), self.a.T)

        return compute() if self.inputs is None else self.inputs.once("overlap", compute)

    def squares(self) -> Float[Tensor, " pos"]:
        kind = accumulator(self.a.dtype)
        return self.g.to(kind).square().sum(1) * self.a.to(kind).square().sum(1)

    def reduce(self, weights: Float[Tensor, " pos"]) -> Tensor:
        """One GEMM, the size of the ordinary weight gradient; the narrower factor is scaled."""
        left, right = self._weighted(weights)
        return left @ right

    def reduce_into(self, total: Float[Tensor, "out inp"], weights: Float[Tensor, " pos"]) -> None:
        """total += Σ_t w_t G_t in one GEMM, which rounds the sum alone."""
        add_matmul_(total, *self._weighted(weights))

    def _weighted(self, weights: Float[Tensor, " pos"]) -> tuple[Tensor, Tensor]:
        """The factors gᵀ and a, the narrower one scaled."""
        if self.g.shape[1] <= self.a.shape[1]:
            return (self.g * weights[:, None].to(self.g.dtype)).T, self.a
        return self.g.T, self.a * weights[:, None].to(self.a.dtype)

    def sums(self, layout: Layout, columns: slice = slice(None)) -> Float[Tensor, "row out inp"]:
        """V_i, all sequences stacked, for some columns of the parameter."""
        g = layout.grid(self.g, clear=True)
        a = layout.grid(self.a[:, columns], clear=False)
        return layout.total(matmul(g.transpose(1, 2), a))

    def project(
        self, sums: Float[Tensor, "row out inp"], columns: slice
    ) -> Float[Tensor, "pos row"]:
        """g_tᵀ V_i a_t over some columns of V."""
        left = self.g.to(sums.dtype) @ sums
        return (left * self.a[:, columns].to(sums.dtype)).sum(2).T

    def narrowed(self, sketch: Float[Tensor, "inp width"]) -> "Outer":
        """The position gradients G_t Ω of a random projection Ω of the inputs."""
        return Outer((self.a.to(sketch.dtype) @ sketch).to(self.a.dtype), self.g)

    @property
    def tall(self) -> "Outer":
        """The gradients, transposed if need be, so that the projected side is the longer."""
        return self if self.a.shape[1] >= self.g.shape[1] else Outer(self.g, self.a)


class SharedInput:
    """An input `a` that several layers multiply (q, k, v; gate, up), and its products a aᵀ.

    The layers share the overlap set of the first of them, the `leader`. A product is computed by
    the layer that comes first in the backward pass and dropped by the last.
    """

    __slots__ = ("_kept", "layers", "leader")

    def __init__(self, leader: Any) -> None:
        self.leader = leader  # the handle of its weight
        self.layers = 1
        self._kept: dict[str, tuple[Tensor, int]] = {}

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The product `name`, computed for the first of the layers that asks for it."""
        kept = self._kept.pop(name) if name in self._kept else (compute(), self.layers)
        product, left = kept
        if left > 1:
            self._kept[name] = product, left - 1
        return product


@dataclass(frozen=True)
class Dense:
    """G_t itself; the parameter is a vector."""

    grads: Float[Tensor, "pos out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grads.shape[1],)

    @property
    def positions(self) -> int:
        return self.grads.shape[0]

    @property
    def device(self) -> torch.device:
        return self.grads.device

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def gram(self, picked: "Dense") -> Float[Tensor, "pick pos"]:
        return matmul(picked.grads, self.grads.T)

    def squares(self) -> Float[Tensor, " pos"]:
        return self.grads.to(accumulator(self.grads.dtype)).square().sum(1)

    def reduce(self, weights: Float[Tensor, " pos"]) -> Tensor:
        return weights.to(self.grads.dtype) @ self.grads

    def sums(self, layout: Layout) -> Float[Tensor, "row out"]:
        return layout.total(layout.sum_rows(self.grads))


@dataclass(frozen=True)
class OneHot:
    """G_t = e_id(t) g_tᵀ; the parameter has `size` rows, one per token."""

    ids: Int[Tensor, " pos"]
    g: Float[Tensor, "pos out"]
    size: int
    padding: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size, self.g.shape[1])

    @property
    def positions(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.g.device

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def live(self) -> Float[Tensor, "pos out"]:
        """g, 0 where the token is padding: that row of the parameter is never trained."""
        return self.g if self.padding < 0 else self.g * (self.ids != self.padding)[:, None]

    def gram(self, picked: "OneHot") -> Float[Tensor, "pick pos"]:
        return matmul(picked.live, self.live.T) * (picked.ids[:, None] == self.ids)

    def squares(self) -> Float[Tensor, " pos"]:
        return self.live.to(accumulator(self.g.dtype)).square().sum(1)

    def reduce(self, weights: Float[Tensor, " pos"]) -> Tensor:
        g = self.g * weights[:, None].to(self.g.dtype)
        return torch.ops.aten.embedding_dense_backward(g, self.ids, self.size, self.padding, False)

    def pairs(self, layout: Layout) -> tuple[Dense, Int[Tensor, " pos"], Int[Tensor, " pos"]]:
        """Σ g over each (sequence, token) pair, in one row per pair (rows left over are 0).

        Returns the sums with the sequence and the token of every row. There are at most as many
        pairs as positions, so the buffer has that size and no count comes back to the host.
        """
        key = torch.where(layout.valid, layout.seq * self.size + self.ids, -1)
        key, order = torch.sort(key)
        new = torch.ones_like(key)
        new[1:] = key[1:] != key[:-1]
        slot = new.cumsum(0) - 1
        g = self.live[order].to(accumulator(self.g.dtype)) * (key >= 0)[:, None]
        pair = torch.full_like(key, -1).scatter_(0, slot, key)
        row = torch.where(pair >= 0, pair.div(self.size, rounding_mode="floor"), -1)
        return Dense(sum_by(g, slot, len(g))), row, pair.remainder(self.size)


AnyGradients = Outer | Dense | OneHot
Some = TypeVar("Some", bound=PositionGradients)
_COLUMNS = {Outer: ("a", "g"), Dense: ("grads",), OneHot: ("ids", "g")}


def at_positions(rows: Some, layout: Layout, index: Int[Tensor, " some"]) -> Some:
    """Gradients of some positions of `layout.whole`, of any rank."""
    return _replaced(rows, layout.fetch(_columns(rows), index))


def gathered(rows: Some, layout: Layout) -> tuple[Some, Layout]:
    """Gradients of all positions of `layout.whole`, and that layout."""
    if layout.alone:
        return rows, layout
    everyone = torch.arange(layout.whole.size, device=layout.seq.device)
    return at_positions(rows, layout, everyone), layout.whole


def joined(parts: Sequence[Some]) -> Some:
    """Gradients of several calls of one module, one after the other."""
    return _replaced(parts[0], [torch.cat(same) for same in zip(*map(_columns, parts))])


def _columns(rows: Any) -> list[Tensor]:
    """Tensors with one row per position."""
    return [getattr(rows, name) for name in _COLUMNS[type(rows)]]


def _replaced(rows: Any, columns: list[Tensor]) -> Any:
    """Gradients of the same kind for other positions."""
    if isinstance(rows, Outer):
        a, g = columns
        return Outer(a, g)  # no longer an input that others share
    return replace(rows, **dict(zip(_COLUMNS[type(rows)], columns)))
