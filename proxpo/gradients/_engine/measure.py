"""Lengths and kernels of one parameter in the cheapest form, and the weighted sum Σ_i w_i V_i.

The forms are in `inner_products.py`, their costs in `cost.py`; on CUDA the common case of ISOPO
runs in the kernels of `fused.py`.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from proxpo.gradients._engine import cost, inner_products
from proxpo.gradients._engine.device import accumulator, matmul
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

ALL = slice(None)  # every sequence of the micro-batch


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


class ScaleOptions(NamedTuple):
    """Exponents of F, N and R, their ρ, and ε: s_i = reg2(F)^p reg2(N)^q reg2(R)^r."""

    p: float
    q: float
    r: float
    reg: tuple[float, float, float]
    eps: float
    keep_small: bool


class LengthRule(ABC):
    """A rule whose weight of a sequence follows from the lengths of its gradient (ISOPO)."""

    @property
    @abstractmethod
    def measurement(self) -> Measurement:
        """Lengths that the weights need."""

    @property
    @abstractmethod
    def options(self) -> ScaleOptions:
        """Options of `isopo.scale`."""

    @abstractmethod
    def means(self, handle: ParameterHandle) -> tuple[Float[Tensor, ""] | None, ...]:
        """E[x²] of F, N and R over earlier mini-batches, where they are known and in use."""

    @abstractmethod
    def needs_all(self, handle: ParameterHandle) -> bool:
        """True where a weight depends on the lengths of other sequences in this backward."""

    @abstractmethod
    def length_weights(
        self,
        handle: ParameterHandle,
        lengths: SquaredLengths,
        sequences: Int[Tensor, " some"] | slice = ALL,
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
) -> Tensor | None:
    """Σ_i w_i V_i with w_i from the lengths of V_i; None where `.grad` has it already."""
    wanted = rule.measurement
    if wanted.empty:
        weights = rule.length_weights(handle, SquaredLengths())
        return _reduced(handle, rows, layout.spread(weights))
    if rows.device.type == "cuda" and (out := _fused(rule, handle, rows, layout)) is not None:
        return out.grad
    streams = wanted.norm and not (rule.needs_all(handle) or layout.bounded)
    if streams and isinstance(rows, Outer) and _path(wanted, rows, layout, True) == "stream":
        return _streamed(rule, handle, rows, layout)
    lengths = measured(wanted, handle, rows, layout, streams=streams)
    weights = rule.length_weights(handle, lengths)
    if lengths.sums is not None and layout.alone:
        flat = weights @ lengths.sums.reshape(layout.count, -1).to(weights.dtype)
        return flat.view(rows.shape)
    return _reduced(handle, rows, layout.spread(weights))


def _reduced(
    handle: ParameterHandle, rows: AnyGradients, weights: Float[Tensor, " pos"]
) -> Tensor | None:
    """Σ_t w_t G_t; None where it was added to the parameter's gradient at once."""
    total = _total(handle, rows)
    if total is None or not isinstance(rows, Outer):
        return rows.reduce(weights)
    rows.reduce_into(total, weights)
    return None


def _total(handle: ParameterHandle, rows: AnyGradients) -> Tensor | None:
    """The gradient of a weight, where a product may be added to it without passing autograd."""
    if handle.session.padded is None or not isinstance(rows, Outer):
        return None
    grad = handle.parameter.grad
    fits = grad is not None and grad.dtype in (rows.dtype, accumulator(rows.dtype))
    return grad if fits and rows.g.dtype == rows.a.dtype else None


def measured(
    wanted: Measurement,
    handle: ParameterHandle,
    rows: AnyGradients,
    layout: Layout,
    *,
    streams: bool = True,
) -> SquaredLengths:
    """Lengths of all sequences in the cheapest form; `streams` as in `cost.cheapest_form`."""
    overlap_set = _overlap_set(handle, rows, layout) if wanted.overlap else None
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
    if path == "materialise" and _stackable(rows, layout):
        sums = rows.sums(layout)
        norm2 = inner_products.length2(sums)
        if overlap_set is None:
            return SquaredLengths(None, None, norm2, sums)
        picked = at_positions(rows, layout, overlap_set.index)
        inner = picked.project(sums, slice(None))
        top, bottom = overlap_set.sum(inner.square()), overlap_set.sum(picked.squares())
        return SquaredLengths(top, bottom, norm2, sums)
    if path == "materialise":
        return SquaredLengths(*inner_products.materialised(rows, layout, overlap_set))
    lengths = SquaredLengths(*_overlap(rows, layout, overlap_set))
    if not wanted.norm:
        return lengths
    return lengths._replace(norm2=_norm2(wanted, handle, rows, layout, path)[0])


def _stackable(rows: Outer, layout: Layout) -> bool:
    """True where V of all sequences may be held at once."""
    return layout.alone and layout.count * rows.a.shape[1] * rows.g.shape[1] <= cost.KEEP


def _norm2(
    wanted: Measurement, handle: ParameterHandle, rows: Outer, layout: Layout, path: str
) -> tuple[Float[Tensor, " row"], Float[Tensor, "row out inp"] | None]:
    """N_i², and stacked V where it was built whole."""
    if wanted.sketch is not None:
        signs = handle.session.signs
        return inner_products.norm_sketch(rows, layout, wanted.sketch, signs), None
    if path != "materialise":
        return inner_products.norm_gram(rows, layout), None
    if not _stackable(rows, layout):
        return inner_products.materialised(rows, layout, None)[2], None
    sums = rows.sums(layout)
    return inner_products.length2(sums), sums


def _overlap_set(handle: ParameterHandle, rows: AnyGradients, layout: Layout) -> OverlapSet:
    """J of a parameter; layers that share an input share that of the first of them."""
    shared = rows.inputs if isinstance(rows, Outer) else None
    return (handle if shared is None else shared.leader).overlap_set(layout)


def _path(wanted: Measurement, rows: Outer, layout: Layout, streams: bool) -> str:
    size = layout.whole.size
    overlap = size if wanted.drawn is None else min(wanted.drawn, size)
    return cost.cheapest_form(
        cost.Sizes.of(rows, layout),
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
    overlap_set = _overlap_set(handle, rows, layout) if rule.measurement.overlap else None
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


def _fused(rule: LengthRule, handle: ParameterHandle, rows: AnyGradients, layout: Layout) -> Any:
    """Σ_i w_i V_i in few kernels, as `fused.Weighted`; None where they do not apply."""
    wanted = rule.measurement
    # Of other layouts (experts) the host does not know enough without waiting.
    ready = layout is handle.session.layout and layout.alone and wanted.path in ("auto", "gram")
    kernels = fused_kernels() if ready else None
    if kernels is None or isinstance(rows, OneHot) or rule.needs_all(handle):
        return None
    overlap_set = _overlap_set(handle, rows, layout) if wanted.overlap else None
    if not kernels.fits(layout, overlap_set, rows.dtype):
        return None
    norm2: Tensor | None = None
    sums: Tensor | None = None
    if isinstance(rows, Dense):
        sums = rows.sums(layout)
        norm2 = inner_products.length2(sums) if wanted.norm else None
    elif wanted.norm:
        path = _path(wanted, rows, layout, streams=True)
        if path == "stream":
            return None
        norm2, sums = _norm2(wanted, handle, rows, layout, path)
    advantages, options, means = rule.base_weights(handle.session), rule.options, rule.means(handle)
    total = _total(handle, rows) if sums is None else None
    out = kernels.weighted(
        rows, layout, overlap_set, norm2, sums, advantages, options, means, total
    )
    squares = {"F": out.f2} if wanted.overlap else {}
    if norm2 is not None:
        squares["N"] = norm2
    if options.r:
        squares["R"] = out.r2
    rule.record(handle, squares, out.weights)
    return out


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
        self,
        handles: Sequence[ParameterHandle],
        kernels: Float[Tensor, "parameter group member member"],
        noise: Float[Tensor, " parameter"] | None = None,
    ) -> Float[Tensor, "parameter row"]:
        """w from K_ij = ⟨V_i, V_j⟩ of some parameters, group by group; records K and weights."""

    @abstractmethod
    def noise(self, rows: AnyGradients, layout: Layout) -> Float[Tensor, ""] | None:
        """Trace of a kernel of nothing but rounding errors; None where it may have any."""


class _Postponed(NamedTuple):
    """A parameter whose kernel is known, and what its weighted sum needs."""

    handle: ParameterHandle
    kernel: Float[Tensor, "group member member"]
    rows: Outer | OneHot | None  # None where V is held
    sums: Float[Tensor, "place out"] | None
    noise: Float[Tensor, ""] | None

    @property
    def size(self) -> int:
        """Bytes that wait."""
        return 0 if self.rows is None else self.rows.g.nbytes


def weighted_by_kernel(
    rule: KernelRule, handle: ParameterHandle, rows: AnyGradients, layout: Layout
) -> Tensor | None:
    """Σ_i w_i V_i with w from the kernel of the V_i: from stacked V if it was built whole.

    In a block on padded rows the weights of many parameters are computed together, unless that
    would keep V of a weight: a kernel's linear system is small, and a launch costs as much.
    """
    session, groups = handle.session, handle.session.groups
    kind = inner_products.stack_dtype(rows, layout) if isinstance(rows, Outer) else rows.dtype
    whole = isinstance(rows, Dense) or not cost.reading_pays(layout, kind)
    together = session.padded is not None and layout is session.layout and whole
    holds = isinstance(rows, Dense) or not together
    kernel, sums = kernel_matrix(rows, layout, rule.path, groups, holds=holds)
    noise = rule.noise(rows, layout)
    if together:
        own = None if isinstance(rows, Dense) else rows
        part = _Postponed(handle, kernel, own, sums, noise)
        waiting = session.postpone(part, functools.partial(_finish, rule, session))
        if sum(other.size for other in waiting) > cost.POSTPONED:
            session.finish()
        return None
    weights = rule.kernel_weights([handle], kernel[None], None if noise is None else noise[None])[0]
    if sums is not None and layout.alone:
        flat = groups.arranged(weights).to(sums.dtype) @ sums.flatten(1)
        return flat.view(rows.shape)
    return rows.reduce(layout.spread(weights))


def _finish(rule: KernelRule, session: Session, parts: list[_Postponed]) -> None:
    """Adds Σ_i w_i V_i to the gradients of parameters whose weights are computed together."""
    kernels = torch.stack([part.kernel for part in parts])
    noises = [part.noise for part in parts if part.noise is not None]
    noise = torch.stack(noises) if noises else None
    weights = rule.kernel_weights([part.handle for part in parts], kernels, noise)
    spread: dict[torch.dtype, Tensor] = {}
    for number, (handle, _, rows, sums, _) in enumerate(parts):
        if rows is None:
            assert sums is not None
            handle.add(session.groups.arranged(weights[number]).to(sums.dtype) @ sums)
            continue
        if rows.dtype not in spread:
            spread[rows.dtype] = session.layout.spread(weights.to(rows.dtype))
        gradient = _reduced(handle, rows, spread[rows.dtype][number])
        if gradient is not None:
            handle.add(gradient)


def kernel_matrix(
    rows: AnyGradients,
    layout: Layout,
    path: str,
    groups: Groups,
    *,
    rounded: bool = True,
    holds: bool = True,
) -> tuple[Float[Tensor, "group member member"], Float[Tensor, "place *shape"] | None]:
    """K_ij = ⟨V_i, V_j⟩ in the cheapest form, and stacked V where it was built whole.

    rounded: V may be in bfloat16, see `inner_products.stack_dtype`.
    holds: stacked V of a weight may be returned
    """
    if isinstance(rows, OneHot):
        return inner_products.kernel_gram(rows, layout, groups), None
    if isinstance(rows, Dense):
        sums = groups.arranged(rows.sums(layout))
        return inner_products.kernel_stacked(sums.unflatten(0, (groups.count, -1))), sums
    kind = inner_products.stack_dtype(rows, layout, rounded=rounded)
    held = holds and cost.holds_stack(rows.shape, layout, groups, kind)
    if cost.gram_kernel(rows.shape, layout, groups, path, kind, held=held):
        return inner_products.kernel_gram(rows, layout, groups), None
    return inner_products.kernel_materialised(rows, layout, groups, kind=kind, held=held)
