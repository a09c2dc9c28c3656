"""ISOPO, non-interacting: each sequence's gradient scaled by powers of its lengths.

U = Σ_i A_i s_i V_i,   s_i = reg2(F_i)^p reg2(N_i)^q reg2(R_i)^r          arXiv:2512.23353
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from proxpo.gradients import _norms, _plan
from proxpo.gradients._layout import Layout
from proxpo.gradients._rows import Dense, OneHot, Outer, at
from proxpo.gradients._session import AnyRows, Session, Site
from proxpo.ops.shapes import Float, Int, Tensor


class Lengths(NamedTuple):
    """Squared lengths of the sequences of one layer; None where the exponents ask for none."""

    top: Float[Tensor, " row"] | None  # Σ_j ⟨V_i, G_j⟩²
    bottom: Float[Tensor, ""] | None  # Σ_j |G_j|²
    norm2: Float[Tensor, " row"] | None
    sums: Tensor | None = None  # stacked V, when the path built it whole


@dataclass(frozen=True)
class Isopo:
    """The options of `isopo`, and the method itself."""

    p: float
    q: float
    r: float
    overlap_reg: float
    norm_reg: float
    rel_overlap_reg: float
    eps: float
    keep_small: bool
    overlap: int | None
    norm: Literal["exact", "sketch"]
    sketch: int
    scale: Literal["sum", "mean"]
    history: Literal["microbatch", "own"]
    path: _plan.Path

    quantities = ("F", "N", "R")
    spreads = True

    @property
    def strengths(self) -> dict[str, float]:
        """The regularisation ρ of each quantity that has an exponent."""
        rhos = (self.overlap_reg, self.norm_reg, self.rel_overlap_reg)
        exponents = (self.p, self.q, self.r)
        return {x: rho for x, k, rho in zip(self.quantities, exponents, rhos) if k}

    @property
    def needs_overlap(self) -> bool:
        return bool(self.p or self.r)

    @property
    def needs_norm(self) -> bool:
        return bool(self.q or self.r)

    def needs_all(self, site: Site) -> bool:
        """Whether one sequence's weight depends on the lengths of the others in this backward."""
        if self.history != "microbatch":
            return False
        averages = site.session.averages
        used = [x for x, rho in self.strengths.items() if rho > 0]
        return any(averages.get(f"{site.name}/{x}") is None for x in used)

    def gradient(self, site: Site, rows: AnyRows, layout: Layout) -> Tensor:
        if not (self.needs_overlap or self.needs_norm):
            return rows.reduce(layout.spread(self.weights(site)))
        if rows.device.type == "cuda" and (out := self._fused(site, rows, layout)) is not None:
            return out
        if isinstance(rows, Outer) and self._path(site, rows, layout) == "stream":
            return self._streamed(site, rows, layout)
        found = self._measure(site, rows, layout)
        weights = self.weights(site, found.top, found.bottom, found.norm2)
        if found.sums is not None and layout.alone:
            flat = weights @ found.sums.reshape(layout.count, -1).to(weights.dtype)
            return flat.view(rows.shape)
        return rows.reduce(layout.spread(weights))

    def plain(self, session: Session) -> Float[Tensor, " row"]:
        """A_i, or A_i / m."""
        mean = self.scale == "mean"
        return session.advantages / session.layout.count if mean else session.advantages

    def weights(
        self,
        site: Site,
        top: Float[Tensor, " some"] | None = None,
        bottom: Float[Tensor, ""] | None = None,
        norm2: Float[Tensor, " some"] | None = None,
        sequences: Int[Tensor, " some"] | slice = slice(None),
    ) -> Float[Tensor, " some"]:
        """w_i = A_i s_i (/ m) of some sequences of this layer; their lengths are collected."""
        site.done = True
        scale = self.plain(site.session)[sequences]
        squares: dict[str, Tensor] = {}
        if top is not None and bottom is not None:
            squares["F"] = _norms.ratio2(top, bottom)
        if norm2 is not None:
            squares["N"] = norm2
        if self.r:
            squares["R"] = _norms.ratio2(squares["F"], squares["N"])
        for quantity, exponent in zip(self.quantities, (self.p, self.q, self.r)):
            if exponent:
                factor = self._factor(site, quantity, squares[quantity], exponent)
                if quantity != "N" and bottom is not None:
                    # Nothing overlaps with positions without gradient: leave the length alone.
                    factor = torch.where(bottom == 0, 1.0, factor)
                scale = scale * factor.to(scale.dtype)
        self._note(site, squares, scale)
        return scale

    def _note(self, site: Site, squares: dict[str, Tensor], weights: Tensor) -> None:
        """Feed the trailing averages, the observer and the check for NaN and infinity.

        Lengths are checked beside weights: an infinite one has a weight of 0 and spoils E.
        """
        for quantity, exponent in zip(self.quantities, (self.p, self.q, self.r)):
            if exponent:
                site.session.averages.collect(f"{site.name}/{quantity}", squares[quantity])
                site.session.flag(site, squares[quantity])
        if site.session.observer is not None:
            site.observe(**{f"{x}2": value for x, value in squares.items()}, weights=weights)
        site.session.flag(site, weights)

    def _fused(self, site: Site, rows: AnyRows, layout: Layout) -> Tensor | None:
        """The common case in few kernels; None where it does not apply."""
        alone = self.p and not (self.q or self.r or self.overlap_reg)
        common = alone and self.path in ("auto", "gram")
        # Of other layouts (experts) the host does not know enough without waiting.
        ready = layout is site.session.layout and layout.alone and not isinstance(rows, OneHot)
        kernels = _kernels() if common and ready else None
        if kernels is None:
            return None
        picks = site.picks(layout)
        if not kernels.fits(layout, picks, rows.dtype):
            return None
        run = kernels.dense if isinstance(rows, Dense) else kernels.outer
        advantages = self.plain(site.session)
        grad, f2, weights = run(rows, layout, picks, advantages, p=self.p, eps=self.eps)
        self._note(site, {"F": f2}, weights)
        return grad

    def _factor(self, site: Site, quantity: str, x2: Tensor, exponent: float) -> Tensor:
        averages, key = site.session.averages, f"{site.name}/{quantity}"
        rho = self.strengths[quantity]
        mean2 = averages.get(key) if rho else None
        if rho and mean2 is None:
            mean2 = x2.mean() if self.history == "microbatch" else x2
        base = _norms.regularised(
            x2,
            rho=rho,
            mean2=None if mean2 is None else mean2.to(x2),
            eps=self.eps,
            keep_small=self.keep_small,
        )
        return _norms.power(base, exponent)

    def _path(self, site: Site, rows: Outer, layout: Layout) -> _plan.Path:
        size = layout.whole.size
        overlap = size if self.overlap is None else min(self.overlap, size)
        return _plan.choose(
            rows,
            layout,
            overlap=overlap if self.needs_overlap else 0,
            norm=self.needs_norm and self.norm == "exact",
            path=self.path,
            streams=not self.needs_all(site),
        )

    def _measure(self, site: Site, rows: AnyRows, layout: Layout) -> Lengths:
        picks = site.picks(layout) if self.needs_overlap else None
        if isinstance(rows, Dense):
            return self._measure_dense(rows, layout, picks)
        if isinstance(rows, Outer):
            return self._measure_outer(site, rows, layout, picks)
        top, bottom = _overlap(rows, layout, picks)
        return Lengths(top, bottom, _norms.norm_pairs(rows, layout) if self.needs_norm else None)

    def _measure_dense(self, rows: Dense, layout: Layout, picks: _norms.Picks | None) -> Lengths:
        sums = rows.sums(layout)
        top, bottom = (
            (None, None) if picks is None else _norms.overlap_dense(rows, layout, sums, picks)
        )
        return Lengths(top, bottom, _norms.length2(sums) if self.needs_norm else None, sums)

    def _measure_outer(
        self, site: Site, rows: Outer, layout: Layout, picks: _norms.Picks | None
    ) -> Lengths:
        path = self._path(site, rows, layout)
        entries = layout.count * rows.a.shape[1] * rows.g.shape[1]
        if path == "materialise" and layout.alone and entries <= _plan.KEEP:
            sums = rows.sums(layout)
            if picks is None:
                return Lengths(None, None, _norms.length2(sums), sums)
            picked = at(rows, layout, picks.index)
            inner = picked.project(sums, slice(None))
            keep = picks.valid.to(inner.dtype)
            squares = keep @ picked.squares()
            return Lengths(keep @ inner.square(), squares, _norms.length2(sums), sums)
        if path == "materialise":
            return Lengths(*_norms.materialised(rows, layout, picks))
        top, bottom = _overlap(rows, layout, picks)
        if not self.needs_norm:
            return Lengths(top, bottom, None)
        if self.norm == "sketch":
            norm2 = _norms.norm_sketch(rows, layout, self.sketch, site.session.generator)
        else:
            norm2 = _norms.norm_gram(rows, layout)
        return Lengths(top, bottom, norm2)

    def _streamed(self, site: Site, rows: Outer, layout: Layout) -> Tensor:
        """Build V_i, take its length, scale it, add it, drop it: one buffer, no second GEMM."""
        picks = site.picks(layout) if self.needs_overlap else None
        top, bottom = _overlap(rows, layout, picks)
        total: Tensor | None = None
        for i, members in enumerate(layout.members()):
            one = _norms.matmul(rows.g[members].T, rows.a[members])
            here = slice(i, i + 1)
            mine = None if top is None else top[here]
            norm2 = layout.total(one).square().sum()[None]
            weight = self.weights(site, mine, bottom, norm2, here)
            one = one * weight.to(one.dtype)
            total = one if total is None else total.add_(one)
        assert total is not None
        return total


@functools.cache
def _kernels() -> ModuleType | None:
    """The fused kernels, where Triton is installed."""
    try:
        return importlib.import_module("proxpo.gradients._fused")
    except ImportError:
        return None


def _overlap(
    rows: Outer | OneHot, layout: Layout, picks: _norms.Picks | None
) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if picks is None else _norms.overlap_gram(rows, layout, picks)
