"""PROMA: micro-batches accumulated so that a new one is not undone by those before it.

Accumulation, layer by layer, R the running gradient, v_i = V_i/|V_i|, G_b = Σ_{i∈b} A_i V_i:

    R ← R - σ P + G_b,   P = projection of R onto span{v_i : i ∈ b},  |P| ≤ ρ |G_b|

Intra, within one micro-batch: G_b ← G_b - σ' Q_g Q_gᵀ G_b Q_a Q_aᵀ, with Q_a, Q_g the dominant
subspaces of the layer's inputs and output gradients. arXiv:2601.10498. `project` computes P,
`PromaRule` the share of R that a micro-batch adds, `proma` makes the transform.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from proxpo.errors import ProxpoError, resolve
from proxpo.gradients._engine.device import accumulator
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.inner_products import inner_with
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import kernel_matrix
from proxpo.gradients._engine.options import check_count, check_numbers, refuse_unused
from proxpo.gradients._engine.position_gradients import AnyGradients, Outer
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.gradients._engine.transform import Transform
from proxpo.ops.shapes import Float, Tensor

VARIANTS = ("accumulation", "intra", "both")
SOLVERS = ("exact", "solve", "sweep")


def project(
    unit: Float[Tensor, "row row"],
    against: Float[Tensor, " row"],
    *,
    solver: str,
    small: float,
) -> Float[Tensor, " row"]:
    """w with P = Σ w_i v_i, from the Gram matrix of the unit vectors and r_i = ⟨R, v_i⟩.

    `small` is the ridge of "solve" and, for "exact", the cut-off of the eigenvalues where v_i
    depend on each other. "sweep" is x ← x - ⟨x, v_i⟩ v_i for one i after the other, twice over; in
    the weights w that is two Gauss-Seidel steps, each a triangular solve.
    """
    if solver == "exact":
        # On the host: eigenvalues of a nearly singular kernel do not always converge on a GPU.
        host = unit.cpu()
        if not bool(torch.isfinite(host).all()):
            return torch.full_like(against, torch.nan)  # no eigenvalues
        inverse = torch.linalg.pinv(host, rtol=small, hermitian=True)
        return inverse.to(unit.device) @ against
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    if solver == "solve":
        factor = torch.linalg.cholesky_ex(unit + small * eye).L
        return torch.cholesky_solve(against[:, None], factor)[:, 0]
    lower = unit.tril(-1) + eye
    weights = torch.zeros_like(against)
    for _ in range(2):
        rest = (against - unit.triu(1) @ weights)[:, None]
        weights = torch.linalg.solve_triangular(lower, rest, upper=False, unitriangular=True)[:, 0]
    return weights


@dataclass(frozen=True)
class PromaRule:
    """The options of `proma`, and the running gradient R of every parameter."""

    variant: str
    solver: str
    sigma: float
    rho: float | None
    ridge: float
    dim: int
    intra_sigma: float
    exact_bases: bool
    path: str
    running: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    quantities: ClassVar[tuple[str, ...]] = ()
    overlap: ClassVar[int | None] = None
    degree: ClassVar[float] = 1.0

    def base_weights(self, session: Session) -> Float[Tensor, " row"]:
        """A_i: parameters without a per-sequence gradient accumulate as usual."""
        return session.advantages

    def collect_zeros(self, handle: ParameterHandle) -> None:
        """Nothing: no length trails."""

    def gradient(self, handle: ParameterHandle, rows: AnyGradients, layout: Layout) -> Tensor:
        """This micro-batch's share of R, so that ordinary accumulation in `.grad` gives R."""
        handle.done = True
        advantages = handle.session.advantages
        share = rows.reduce(layout.spread(advantages))
        if self.variant != "accumulation" and isinstance(rows, Outer):
            share = self._without_bases(handle, share, rows, layout)
        kind = accumulator(share.dtype)
        handle.session.expect_finite(handle, torch.linalg.vector_norm(share, dtype=kind)[None])
        if self.variant == "intra":
            return share
        before = self.running.get(handle.name)
        if before is not None and self.sigma > 0:
            beta = self._projection(handle, before, share, rows, layout)
            share = share - rows.reduce(layout.spread(self.sigma * beta.to(advantages.dtype)))
        part = share.to(kind)
        self.running[handle.name] = part if before is None else before + part
        return share

    def _projection(
        self,
        handle: ParameterHandle,
        running: Tensor,
        share: Tensor,
        rows: AnyGradients,
        layout: Layout,
    ) -> Float[Tensor, " row"]:
        """β with P = Σ_i β_i V_i, bounded by ρ |G_b|; all of it from the kernel of the V_i."""
        everyone = Groups.whole(layout.count)
        kernel = kernel_matrix(rows, layout, self.path, everyone, rounded=False)[0][0]
        noise = len(kernel) * torch.finfo(kernel.dtype).eps
        kernel = kernel.double()
        against = layout.sum_columns(inner_with(rows, running)[None])[0].double()
        length = kernel.diagonal().clamp(min=0).sqrt()
        inverse = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0)
        unit = inverse[:, None] * kernel * inverse
        small = self.ridge if self.solver == "solve" else noise
        weights = project(unit, inverse * against, solver=self.solver, small=small)
        size = (weights @ unit @ weights).clamp(min=0).sqrt()
        if self.rho is not None:
            bound = self.rho * torch.linalg.vector_norm(share.double())
            weights = weights * torch.where(size > bound, bound / size.clamp(min=1e-300), 1.0)
        handle.observe(projected=size, kernel=kernel, weights=inverse * weights)
        handle.session.expect_finite(handle, weights)
        return inverse * weights

    def _without_bases(
        self, handle: ParameterHandle, share: Tensor, rows: Outer, layout: Layout
    ) -> Tensor:
        """G_b without its part in the dominant subspaces of g and a."""
        rank = min(self.dim, rows.positions, *rows.shape)
        if rank == 0 or self.intra_sigma == 0.0:
            return share
        valid = layout.valid[:, None]
        left, right = (
            self._basis(x * valid, rank, handle.session.generator) for x in (rows.g, rows.a)
        )
        inner = left.T @ share.to(left.dtype) @ right
        return share - (self.intra_sigma * left @ inner @ right.T).to(share.dtype)

    def _basis(
        self, x: Float[Tensor, "pos wide"], rank: int, generator: torch.Generator
    ) -> Float[Tensor, "wide rank"]:
        """Orthonormal basis of the dominant right singular subspace of x."""
        x = x.to(accumulator(x.dtype))
        if self.exact_bases and not bool(torch.isfinite(x).all()):
            return x.new_full((x.shape[1], rank), torch.nan)  # the SVD refuses NaN
        if self.exact_bases:
            return torch.linalg.svd(x, full_matrices=False).Vh[:rank].T
        start = torch.randn(x.shape[0], rank, generator=generator, device=x.device, dtype=x.dtype)
        return torch.linalg.qr(x.T @ (x @ (x.T @ start))).Q


class Proma(Transform):
    """A transform that keeps the running gradient between two steps."""

    rule: PromaRule

    def step(self, *, skipped: bool = False) -> None:
        """Ends an accumulation: the next block starts a new one."""
        super().step(skipped=skipped)
        self.rule.running.clear()

    @property
    def _keeps_lengths(self) -> bool:
        return super()._keeps_lengths or bool(self.rule.running)

    def _collected(self) -> dict[str, Any]:
        return {**super()._collected(), "running": dict(self.rule.running)}

    def _nothing(self) -> dict[str, Any]:
        return {**super()._nothing(), "running": {}}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self.rule.running.clear()
        self.rule.running.update(kept["running"])

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.rule.running.clear()


def proma(
    *,
    variant: str = "accumulation",
    solver: str = "solve",
    sigma: float = 1.0,
    rho: float | None = 0.5,
    ridge: float = 0.01,
    dim: int = 30,
    intra_sigma: float = 1.0,
    bases: str = "random",
    path: str = "auto",
    seed: int = 0,
) -> Proma:
    """PROMA as a transform: one `applied` block per micro-batch, `step()` after the last.

    variant: "accumulation" depends on the order of the micro-batches and is REINFORCE for one of
        them; "intra" treats each alone; "both" accumulates what intra leaves.
    solver: projection of R: "exact" least squares; "solve" with a `ridge` on the Gram matrix of
        the v_i; "sweep", two passes that remove one v_i after the other.
    sigma, rho: share of the projection that is removed, and its bound against |G_b| (None: none).
    dim, intra_sigma, bases: rank and share of what intra removes; bases by a randomised range
        finder ("random") or by SVD ("exact"). Vectors and embeddings have no intra variant.
    path: form in which the Gram matrix is computed, as in `isopo_ntk`.

    The running gradient of every layer is kept beside `.grad`, unsharded, between two `step()`s;
    call `step(skipped=True)` when an optimizer step is left out.

    ridge: ridge of solver="solve"
    seed: seed of the random draws
    """
    check_numbers("proma", {"sigma": sigma, "intra_sigma": intra_sigma, "ridge": ridge}, least=0.0)
    if rho is not None:
        check_numbers("proma", {"rho": rho}, least=0.0)
    check_count("proma", "dim", dim, least=0)
    if solver == "solve" and ridge == 0.0:
        raise ProxpoError("proma: solver 'solve' needs ridge > 0; without one use solver 'exact'")
    bases = resolve(bases, ("random", "exact"), what="bases of proma")
    rule = PromaRule(
        variant=resolve(variant, VARIANTS, what="variant of proma"),
        solver=resolve(solver, SOLVERS, what="solver of proma"),
        sigma=sigma,
        rho=rho,
        ridge=ridge,
        dim=dim,
        intra_sigma=intra_sigma,
        exact_bases=bases == "exact",
        path=resolve(path, ("auto", "gram", "materialise"), what="path of proma"),
    )
    of_projection = {"solver": rule.solver, "sigma": sigma, "rho": rho, "ridge": ridge}
    of_intra = {"dim": dim, "intra_sigma": intra_sigma, "bases": bases}
    if rule.variant != "both":
        unused = of_projection if rule.variant == "intra" else of_intra
        refuse_unused(proma, unused, f"with variant={rule.variant}", "variant=both")
    if rule.solver != "solve":
        refuse_unused(proma, {"ridge": ridge}, f"with solver={rule.solver}", "solver=solve")
    return Proma(rule, seed=seed)
