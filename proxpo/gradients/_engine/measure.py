"""Lengths and kernels of one parameter in the cheapest form, and the weighted sum Σ_i w_i V_i.

The forms are in `inner_products.py`, their costs in `cost.py`; on CUDA the common case of ISOPO
runs in the kernels of `fused.py`.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from proxpo.gradients._engine import cost, inner_products
from proxpo.gradients._engine.device import matmul
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.inner_products import OverlapSet
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_gradients import (
    AnyGradients,
    Dense,
    OneHot,
    Outer,
    at_positions,
)
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.ops.shapes import Float, Int, Tensor


class SquaredLengths(NamedTuple):
    """Squared lengths of the sequence gradients of one parameter; None where not asked for.

    F_i² = top_i / bottom, kept apart because bottom = 0 means that F is undefined.
    """

    top: Float[Tensor, " row"] | None = None  # Σ_j ⟨V_i, G_j⟩²
    bottom: Float[Tensor, ""] | None = None  # Σ_j |G_j|²
    norm2: Float[Tensor, " row"] | None = None  # N_i²
    sums: Tensor | None = None  # stacked V, where the form built it whole


@dataclass(frozen=True)
class Measurement:
    """Lengths to measure: F over an overlap set of `drawn` positions (None: all), N, or both."""

    overlap: bool
    norm: bool
    drawn: int | None
    sketch: int | None = None  # random projections that estimate N; None for the exact N
    path: str = "auto"

    @property
    def empty(self) -> bool:
        return not (self.overlap or self.norm)


class LengthRule(ABC):
    """A rule whose weight of a sequence follows from the lengths of its gradient (ISOPO)."""

    @property
    @abstractmethod
    def measurement(self) -> Measurement:
        """Lengths that the weights need."""

    @property
    @abstractmethod
    def fisher_power(self) -> tuple[float, float] | None:
        """(p, ε) where w_i = A_i (F_i² + ε)^(p/2), the case of the fused kernels; else None."""

    @abstractmethod
    def needs_all(self, handle: ParameterHandle) -> bool:
        """True where a weight depends on the lengths of other sequences in this backward."""

    @abstractmethod
    def length_weights(
        self,
        handle: ParameterHandle,
        lengths: SquaredLengths,
        sequences: Int[Tensor, " some"] | slice = slice(None),
    ) -> Float[Tensor, " some"]:
        """w_i of the sequences whose lengths are given; records lengths and weights."""

    @abstractmethod
    def base_weights(self, session: Session) -> Float[Tensor, " row"]:
        """A_i in the scale of the rule."""

    @abstractmethod
    def record(self, handle: ParameterHandle, squares: dict[str, Tensor], weights: Tensor) -> None:
        """Passes squared lengths and weights on to averages, observer and the check for NaN."""


def weighted_by_lengths(
    rule: LengthRule, handle: ParameterHandle, rows: AnyGradients, layout: Layout
) -> Tensor:
    """Σ_i w_i V_i with w_i from the lengths of V_i."""
    wanted = rule.measurement
    if wanted.empty:
        return rows.reduce(layout.spread(rule.length_weights(handle, SquaredLengths())))
    if rows.device.type == "cuda" and (out := _fused(rule, handle, rows, layout)) is not None:
        return out
    streams = not rule.needs_all(handle)
    if isinstance(rows, Outer) and _path(wanted, rows, layout, streams) == "stream":
        return _streamed(rule, handle, rows, layout)
    lengths = measured(wanted, handle, rows, layout, streams=streams)
    weights = rule.length_weights(handle, lengths)
    if lengths.sums is not None and layout.alone:
        flat = weights @ lengths.sums.reshape(layout.count, -1).to(weights.dtype)
        return flat.view(rows.shape)
    return rows.reduce(layout.spread(weights))


def measured(
    wanted: Measurement,
    handle: ParameterHandle,
    rows: AnyGradients,
    layout: Layout,
    *,
    streams: bool = True,
) -> SquaredLengths:
    """Lengths of all sequences in the cheapest form; `streams` as in `cost.cheapest_form`."""
    overlap_set = handle.overlap_set(layout) if wanted.overlap else None
    if isinstance(rows, Outer):
        return _measured_outer(wanted, handle, rows, layout, overlap_set, streams)
    if isinstance(rows, OneHot):
        top, bottom = _overlap(rows, layout, overlap_set)
        norm2 = inner_products.norm_pairs(rows, layout) if wanted.norm else None
        return SquaredLengths(top, bottom, norm2)
    sums = rows.sums(layout)
    top, bottom = (
        (None, None)
        if overlap_set is None
        else inner_products.overlap_dense(rows, layout, sums, overlap_set)
    )
    return SquaredLengths(top, bottom, inner_products.length2(sums) if wanted.norm else None, sums)


def _measured_outer(
    wanted: Measurement,
    handle: ParameterHandle,
    rows: Outer,
    layout: Layout,
    overlap_set: OverlapSet | None,
    streams: bool,
) -> SquaredLengths:
    path = _path(wanted, rows, layout, streams)
    entries = layout.count * rows.a.shape[1] * rows.g.shape[1]
    if path == "materialise" and layout.alone and entries <= cost.KEEP:
        sums = rows.sums(layout)
        if overlap_set is None:
            return SquaredLengths(None, None, inner_products.length2(sums), sums)
        picked = at_positions(rows, layout, overlap_set.index)
        inner = picked.project(sums, slice(None))
        keep = overlap_set.valid.to(inner.dtype)
        squares = keep @ picked.squares()
        return SquaredLengths(keep @ inner.square(), squares, inner_products.length2(sums), sums)
    if path == "materialise":
        return SquaredLengths(*inner_products.materialised(rows, layout, overlap_set))
    top, bottom = _overlap(rows, layout, overlap_set)
    if not wanted.norm:
        return SquaredLengths(top, bottom, None)
    if wanted.sketch is not None:
        norm2 = inner_products.norm_sketch(rows, layout, wanted.sketch, handle.session.generator)
    else:
        norm2 = inner_products.norm_gram(rows, layout)
    return SquaredLengths(top, bottom, norm2)


def _path(wanted: Measurement, rows: Outer, layout: Layout, streams: bool) -> str:
    size = layout.whole.size
    overlap = size if wanted.drawn is None else min(wanted.drawn, size)
    return cost.cheapest_form(
        rows,
        layout,
        overlap=overlap if wanted.overlap else 0,
        norm=wanted.norm and wanted.sketch is None,
        path=wanted.path,
        streams=streams,
    )


def _overlap(
    rows: Outer | OneHot, layout: Layout, overlap_set: OverlapSet | None
) -> tuple[Tensor | None, Tensor | None]:
    if overlap_set is None:
        return None, None
    return inner_products.overlap_gram(rows, layout, overlap_set)


def _streamed(rule: LengthRule, handle: ParameterHandle, rows: Outer, layout: Layout) -> Tensor:
    """Builds V_i, takes its length, scales and adds it, drops it: one buffer, no second GEMM."""
    overlap_set = handle.overlap_set(layout) if rule.measurement.overlap else None
    top, bottom = _overlap(rows, layout, overlap_set)
    total: Tensor | None = None
    for i, members in enumerate(layout.members()):
        gradient = matmul(rows.g[members].T, rows.a[members])
        index = slice(i, i + 1)
        lengths = SquaredLengths(
            None if top is None else top[index],
            bottom,
            layout.total(gradient).square().sum()[None],
        )
        weight = rule.length_weights(handle, lengths, index)
        gradient = gradient * weight.to(gradient.dtype)
        total = gradient if total is None else total.add_(gradient)
    assert total is not None
    return total


def _fused(
    rule: LengthRule, handle: ParameterHandle, rows: AnyGradients, layout: Layout
) -> Tensor | None:
    """The common case in few kernels; None where it does not apply."""
    common = rule.fisher_power if rule.measurement.path in ("auto", "gram") else None
    # Of other layouts (experts) the host does not know enough without waiting.
    ready = layout is handle.session.layout and layout.alone and not isinstance(rows, OneHot)
    kernels = fused_kernels() if common and ready else None
    if kernels is None or common is None:
        return None
    overlap_set = handle.overlap_set(layout)
    if not kernels.fits(layout, overlap_set, rows.dtype):
        return None
    run = kernels.dense if isinstance(rows, Dense) else kernels.outer
    p, eps = common
    advantages = rule.base_weights(handle.session)
    grad, f2, weights = run(rows, layout, overlap_set, advantages, p=p, eps=eps)
    rule.record(handle, {"F": f2}, weights)
    return grad


@functools.cache
def fused_kernels() -> ModuleType | None:
    """The module of fused kernels, where Triton is installed."""
    try:
        return importlib.import_module("proxpo.gradients._engine.fused")
    except ImportError:
        return None


class KernelRule(ABC):
    """A rule whose weights follow from the kernel of all sequence gradients (ISOPO-NTK)."""

    path: str

    @abstractmethod
    def kernel_weights(
        self, handle: ParameterHandle, kernel: Float[Tensor, "group member member"]
    ) -> Float[Tensor, " row"]:
        """w from K_ij = ⟨V_i, V_j⟩ of one parameter, group by group; records K and weights."""


def weighted_by_kernel(
    rule: KernelRule, handle: ParameterHandle, rows: AnyGradients, layout: Layout
) -> Tensor:
    """Σ_i w_i V_i with w from the kernel of the V_i: from stacked V if it was built whole."""
    groups = handle.session.groups
    kernel, sums = kernel_matrix(rows, layout, rule.path, groups)
    weights = rule.kernel_weights(handle, kernel)
    if sums is not None and layout.alone:
        flat = groups.arranged(weights).to(sums.dtype) @ sums.flatten(1)
        return flat.view(rows.shape)
    return rows.reduce(layout.spread(weights))


def kernel_matrix(
    rows: AnyGradients, layout: Layout, path: str, groups: Groups, *, rounded: bool = True
) -> tuple[Float[Tensor, "group member member"], Float[Tensor, "place *shape"] | None]:
    """K_ij = ⟨V_i, V_j⟩ in the cheapest form, and stacked V where it was built whole.

    rounded: V may be in bfloat16, see `inner_products.stack_dtype`.
    """
    if isinstance(rows, OneHot):
        return inner_products.kernel_gram(rows, layout, groups), None
    if isinstance(rows, Dense):
        sums = groups.arranged(rows.sums(layout))
        return inner_products.kernel_stacked(sums.unflatten(0, (groups.count, -1))), sums
    kind = inner_products.stack_dtype(rows, layout, rounded=rounded)
    if cost.gram_kernel(rows.shape, layout, groups, path, kind):
        return inner_products.kernel_gram(rows, layout, groups), None
    held = cost.holds_stack(rows.shape, layout, groups, kind)
    return inner_products.kernel_materialised(rows, layout, groups, kind=kind, held=held)
