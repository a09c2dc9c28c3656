"""ISOPO-NTK: the advantages of a micro-batch mixed by the kernel of its sequence gradients.

U = Σ_i Ã_i V_i,   Ã = (K + cI)⁻¹ A,   K_ij = ⟨V_i, V_j⟩,   c = ρ E[tr K / m]   arXiv:2512.23353
"""

from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.gradients import _norms, _plan
from proxpo.gradients._isopo import _kernels
from proxpo.gradients._layout import Layout
from proxpo.gradients._rows import Dense, OneHot, Outer
from proxpo.gradients._session import AnyRows, Session, Site
from proxpo.ops.shapes import Float, Tensor


@dataclass(frozen=True)
class Ntk:
    """The options of `isopo_ntk`, and the method itself."""

    rho: float
    scale: Literal["c", "paper"]
    group_by: Literal["microbatch", "prompt"]
    path: _plan.Path

    quantities = ("trace",)
    overlap = None
    spreads = True

    def gradient(self, site: Site, rows: AnyRows, layout: Layout) -> Tensor:
        kernel, sums = self._kernel(rows, layout)
        weights = self.weights(site, kernel)
        if sums is not None and layout.alone:
            flat = weights.to(sums.dtype) @ sums.reshape(layout.count, -1)
            return flat.view(rows.shape)
        return rows.reduce(layout.spread(weights))

    def plain(self, session: Session) -> Float[Tensor, " row"]:
        """A_i: the limit of scale="c" for a large c."""
        return session.advantages

    def weights(self, site: Site, kernel: Float[Tensor, "row row"]) -> Float[Tensor, " row"]:
        """Ã (times c for scale="c"); the mean squared length of the sequences is collected."""
        site.done = True
        session, key = site.session, f"{site.name}/trace"
        known = session.averages.get(key)
        if session.groups is not None:
            kernel = kernel * (session.groups[:, None] == session.groups)
        weights, mean = self._solve(kernel, session.advantages, known)
        session.averages.collect(key, mean)
        if session.observer is not None:
            c = self.rho * (mean if known is None else known)
            site.observe(kernel=kernel, c=c, weights=weights)
        session.flag(site, mean[None])
        session.flag(site, weights)
        return weights

    def _solve(
        self, kernel: Tensor, advantages: Tensor, known: Tensor | None
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
        """Ã (times c) and tr K / m."""
        fused = _kernels() if kernel.is_cuda else None
        if fused is not None and len(kernel) <= fused.MAX_KERNEL:
            # A restored average may still be on the host.
            average = None if known is None else known.to(kernel.device)
            paper = self.scale == "paper"
            return fused.solve(kernel, advantages, average, rho=self.rho, paper=paper)
        mean = kernel.diagonal().mean()
        c = self.rho * (mean if known is None else known.to(mean)).double()
        solved = _norms.damped_solve(kernel, advantages, c)
        if self.scale == "paper":
            solved = torch.where(c > 0, solved / torch.where(c > 0, c, 1.0), 0.0)
        return solved.to(advantages.dtype), mean

    def _kernel(self, rows: AnyRows, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """K, and stacked V where it was built whole."""
        if isinstance(rows, OneHot):
            return _norms.kernel_pairs(rows, layout), None
        if isinstance(rows, Dense):
            sums = rows.sums(layout)
            return _norms.kernel_stacked(sums), sums
        if self._gram(rows, layout):
            return _norms.kernel_gram(rows, layout), None
        if layout.alone and layout.count * rows.a.shape[1] * rows.g.shape[1] <= _plan.KEEP:
            sums = rows.sums(layout)
            return _norms.kernel_stacked(sums), sums
        return _norms.kernel_materialised(rows, layout), None

    def _gram(self, rows: Outer, layout: Layout) -> bool:
        """T²(O+D) against moving m O D numbers and m² O D products."""
        if self.path != "auto":
            return self.path == "gram"
        out, inp = rows.shape
        byte, wire = _plan.traffic(rows.a.device.type), _plan.wire(rows, layout)
        size = layout.whole.size
        gram = size**2 / layout.ranks * (2.0 * (out + inp) + 16 * byte) + wire * size * (out + inp)
        return gram < layout.count * out * inp * (2.0 * layout.count + 16 * byte + wire)
