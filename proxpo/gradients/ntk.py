"""ISOPO-NTK: the advantages of a micro-batch mixed by the kernel of its sequence gradients.

    U = Σ_i Ã_i V_i      Ã = (K + cI)⁻¹ A      K_ij = ⟨V_i, V_j⟩      c = ρ E[tr K / m]

layer by layer, V_i the gradient of sequence i's log-probability: the damped natural gradient of the
layer within the span of its m sequences (section 3 of arXiv:2512.23353). `mixed_advantages` solves
for Ã, `kernel` says what K is, `Ntk` puts them together, `isopo_ntk` makes the transform.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proxpo.errors import resolve
from proxpo.gradients._engine import measure
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import KernelRule
from proxpo.gradients._engine.options import check_numbers
from proxpo.gradients._engine.position_gradients import AnyGradients
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.gradients._engine.transform import Transform
from proxpo.ops.shapes import Float, Int, Tensor

_MOST = 512  # rows of triangular systems that cuBLAS solves in batches


def mixed_advantages(
    K: Float[Tensor, "*group row row"],
    A: Float[Tensor, "..."],
    c: Float[Tensor, "..."],
) -> Float[Tensor, "*group row"]:
    """c Ã = c (K + cI)⁻¹ A by Cholesky in float64; A itself where c = 0, since then every V_i is 0.

    Solving (K/c + I) x = A keeps the numbers near 1 whatever the scale of the objective. A and c
    are broadcast over the groups.
    """
    c = c.double()[..., None, None]
    matrix = K.double() / torch.where(c > 0, c, 1.0)
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor, info = torch.linalg.cholesky_ex(matrix)
    solved = _twice_solved(factor, A.double().expand(K.shape[:-1])[..., None])[..., 0]
    # A failed factorisation must not pass for a number.
    return torch.where(info[..., None] == 0, solved, torch.nan)


def _twice_solved(
    L: Float[Tensor, "*group row row"], b: Float[Tensor, "*group row 1"]
) -> Float[Tensor, "*group row 1"]:
    """(L Lᵀ)⁻¹ b. On CUDA `cholesky_solve` takes the matrices one by one."""
    if not L.is_cuda or L.dim() == 2 or L.shape[-1] > _MOST:
        return torch.cholesky_solve(b, L)
    half = torch.linalg.solve_triangular(L, b, upper=False)
    return torch.linalg.solve_triangular(L.mT, half, upper=True)


def kernel(G: Float[Tensor, "pos *shape"], seq: Int[Tensor, " pos"]) -> Float[Tensor, "row row"]:
    """K_ij = ⟨V_i, V_j⟩, V_i = Σ_{t∈i} G_t, from the gradient of every position of one parameter.

    For reading and for tests: `_engine` computes the same without G.
    """
    G = G.flatten(1)
    V = torch.stack([G[seq == i].sum(0) for i in range(int(seq.max()) + 1)])
    return V @ V.T


def _rounding2(kind: torch.dtype) -> float:
    """Square of the relative rounding error, with a margin."""
    return (8 * torch.finfo(kind).eps) ** 2


@dataclass(frozen=True)
class Ntk(KernelRule):
    """The options of `isopo_ntk`, and the weights Ã that they give to the sequences of a layer."""

    rho: float
    scale: str
    group_by: str
    path: str

    quantities = ("trace",)
    overlap = None
    spreads = True

    def gradient(
        self, handle: ParameterHandle, rows: AnyGradients, layout: Layout
    ) -> Tensor | None:
        """U = Σ_i Ã_i V_i of one parameter."""
        return measure.weighted_by_kernel(self, handle, rows, layout)

    @property
    def degree(self) -> float:
        """1, and -1 for (K + cI)⁻¹ A itself."""
        return -1.0 if self.scale == "paper" else 1.0

    def collect_zeros(self, handle: ParameterHandle) -> None:
        """A kernel with trace 0."""
        session = handle.session
        session.collect(f"{handle.name}/trace", session.advantages.new_zeros(()), mean=True)

    def noise(self, rows: AnyGradients, layout: Layout) -> Float[Tensor, ""] | None:
        """tr K that rounding makes of Σ_t |G_t|² where it cancels: (K + cI)⁻¹ A enlarges it."""
        if self.scale != "paper":
            return None
        return layout.total(rows.squares().sum()) * _rounding2(rows.dtype)

    def base_weights(self, session: Session) -> Float[Tensor, " row"]:
        """A_i: the limit of scale="c" for a large c."""
        return session.advantages

    def kernel_weights(
        self,
        handles: Sequence[ParameterHandle],
        kernels: Float[Tensor, "parameter group member member"],
        noise: Float[Tensor, " parameter"] | None = None,
    ) -> Float[Tensor, "parameter row"]:
        """Ã (times c for scale="c"); the mean squared length of the sequences is collected.

        A kernel with a trace below `noise`, or within the rounding of the largest, counts as 0.
        """
        session = handles[0].session
        keys = [f"{handle.name}/trace" for handle in handles]
        known = [session.averages.get(key) for key in keys]
        squares = kernels.diagonal(dim1=2, dim2=3).flatten(1)  # |V_i|²
        if noise is not None:
            other = session.largest(squares.sum(1)) * _rounding2(squares.dtype)
            above = squares.sum(1) > torch.maximum(noise.to(other), other)
            kernels = torch.where(above[:, None, None, None], kernels, 0.0)
            squares = torch.where(above[:, None], squares, 0.0)
        # Rows of padding, and those without a trained token, have no part in the mean.
        means = squares.sum(1) / session.trained((squares > 0).any(0))
        averages = _averages(known, means)
        weights = self.solve(kernels, session.advantages, averages, session.groups)
        for handle, key, K, E, mean, w in zip(handles, keys, kernels, known, means, weights):
            handle.done = True
            session.collect(key, mean, mean=True)
            if session.observer is not None:
                c = self.rho * (mean if E is None else E)
                handle.observe(kernel=session.groups.joined(K), c=c, weights=w)
            session.expect_finite(handle, mean[None])
            session.expect_finite(handle, w)
        return weights

    def solve(
        self,
        kernels: Float[Tensor, "parameter group member member"],
        advantages: Float[Tensor, " row"],
        averages: Float[Tensor, " parameter"],
        groups: Groups,
    ) -> Float[Tensor, "parameter row"]:
        """Ã (times c), c = ρ times the average of tr K / m."""
        A = groups.arranged(advantages).view(groups.count, groups.size)
        fused = measure.fused_kernels() if kernels.is_cuda else None
        if fused is not None and groups.size <= fused.MAX_KERNEL:
            paper, number = self.scale == "paper", len(advantages)
            solved, _ = fused.solve(kernels, A, averages, rho=self.rho, paper=paper, number=number)
        else:
            c = self.rho * averages.double()[:, None]
            solved = mixed_advantages(kernels, A, c)
            if self.scale == "paper":
                c = c[..., None]
                solved = torch.where(c > 0, solved / torch.where(c > 0, c, 1.0), 0.0)
        by_sequence = groups.by_sequence(solved.flatten(1).T).T
        return by_sequence.to(advantages.dtype)


def _averages(
    known: Sequence[Float[Tensor, ""] | None], means: Float[Tensor, " parameter"]
) -> Float[Tensor, " parameter"]:
    """E[tr K / m] of some parameters, their own means where it is not known."""
    if not any(E is not None for E in known):
        return means
    # A restored E may be on the host.
    values = [mean.double() if E is None else E for E, mean in zip(known, means)]
    return torch.stack([value.to(means) for value in values])


def isopo_ntk(
    *,
    rho: float = 1.0,
    scale: str = "c",
    group_by: str = "microbatch",
    path: str = "auto",
) -> Transform:
    """ISOPO-NTK: per layer, the advantages of a micro-batch replaced by (K + cI)⁻¹ A.

        U = Σ_i Ã_i V_i      Ã = (K + cI)⁻¹ A      K_ij = ⟨V_i, V_j⟩      c = ρ E[tr K / m]

    the damped natural gradient of the layer within the span of the sequences. Reference:
    arXiv:2512.23353, section 3.

    scale: "paper" is U as above, and 0 for a layer whose gradient is rounding noise beside the
        largest; "c" multiplies it by c, which bounds it by REINFORCE (its limit for large c).
    group_by: the sequences that interact: the micro-batch, or those of one prompt (pass `groups`
        to `applied`).

    rho: ρ, the damping in units of the mean squared length
    path: form in which the kernel is computed; all agree
    """
    check_numbers("isopo_ntk", {"rho": rho}, above=0.0)
    return Transform(
        Ntk(
            rho=rho,
            scale=resolve(scale, ("c", "paper"), what="scale of isopo_ntk"),
            group_by=resolve(group_by, ("microbatch", "prompt"), what="group_by of isopo_ntk"),
            path=resolve(path, ("auto", "gram", "materialise"), what="path of isopo_ntk"),
        )
    )
