"""ISOPO-NTK: the advantages of a micro-batch mixed by the kernel of its sequence gradients.

    U = Σ_i Ã_i V_i      Ã = (K + cI)⁻¹ A      K_ij = ⟨V_i, V_j⟩      c = ρ E[tr K / m]

layer by layer, V_i the gradient of sequence i's log-probability: the damped natural gradient of the
layer within the span of its m sequences (section 3 of arXiv:2512.23353). `mixed_advantages` solves
for Ã, `kernel` says what K is, `Ntk` puts them together, `isopo_ntk` makes the transform.
"""

import math
from dataclasses import dataclass

import torch

from proxpo.errors import ProxpoError, resolve
from proxpo.gradients._engine import measure
from proxpo.gradients._engine.groups import Groups
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.measure import KernelRule
from proxpo.gradients._engine.position_gradients import AnyGradients
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.gradients._engine.transform import Transform
from proxpo.ops.shapes import Float, Int, Tensor


def mixed_advantages(
    K: Float[Tensor, "*group row row"],
    A: Float[Tensor, "*group row"],
    c: Float[Tensor, ""],
) -> Float[Tensor, "*group row"]:
    """c Ã = c (K + cI)⁻¹ A by Cholesky in float64; A itself where c = 0, since then every V_i is 0.

    Solving (K/c + I) x = A keeps the numbers near 1 whatever the scale of the objective.
    """
    c = c.double()
    scaled = K.double() / torch.where(c > 0, c, 1.0)
    eye = torch.eye(scaled.shape[-1], dtype=torch.float64, device=K.device)
    factor, info = torch.linalg.cholesky_ex(scaled + eye)
    solved = torch.cholesky_solve(A.double()[..., None], factor)[..., 0]
    # A failed factorisation must not pass for a number.
    return torch.where(info[..., None] == 0, solved, torch.nan)


def kernel(G: Float[Tensor, "pos *shape"], seq: Int[Tensor, " pos"]) -> Float[Tensor, "row row"]:
    """K_ij = ⟨V_i, V_j⟩, V_i = Σ_{t∈i} G_t, from the gradient of every position of one parameter.

    For reading and for tests: `_engine` computes the same without G.
    """
    G = G.flatten(1)
    V = torch.stack([G[seq == i].sum(0) for i in range(int(seq.max()) + 1)])
    return V @ V.T


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

    def gradient(self, handle: ParameterHandle, rows: AnyGradients, layout: Layout) -> Tensor:
        """U = Σ_i Ã_i V_i of one parameter."""
        return measure.weighted_by_kernel(self, handle, rows, layout)

    def base_weights(self, session: Session) -> Float[Tensor, " row"]:
        """A_i: the limit of scale="c" for a large c."""
        return session.advantages

    def kernel_weights(
        self, handle: ParameterHandle, kernel: Float[Tensor, "group member member"]
    ) -> Float[Tensor, " row"]:
        """Ã (times c for scale="c"); the mean squared length of the sequences is collected."""
        handle.done = True
        session, key = handle.session, f"{handle.name}/trace"
        known = session.averages.get(key)
        if session.padded is None:
            weights, mean = self.solve(kernel, session.advantages, known, session.groups)
        else:  # rows of padding have no part in the mean
            mean = kernel.diagonal(dim1=1, dim2=2).sum() / session.count
            average = mean if known is None else known
            weights, _ = self.solve(kernel, session.advantages, average, session.groups)
        session.collect(key, mean, mean=True)
        if session.observer is not None:
            c = self.rho * (mean if known is None else known)
            handle.observe(kernel=session.groups.joined(kernel), c=c, weights=weights)
        session.expect_finite(handle, mean[None])
        session.expect_finite(handle, weights)
        return weights

    def solve(
        self,
        kernel: Float[Tensor, "group member member"],
        advantages: Float[Tensor, " row"],
        average: Float[Tensor, ""] | None,
        groups: Groups,
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, ""]]:
        """Ã (times c) and tr K / m; c is ρ times the average of tr K / m, or times its own."""
        A = groups.arranged(advantages).view(groups.count, groups.size)
        fused = measure.fused_kernels() if kernel.is_cuda else None
        if fused is not None and groups.size <= fused.MAX_KERNEL:
            # A restored average may still be on the host.
            average = None if average is None else average.to(kernel.device)
            paper, number = self.scale == "paper", len(advantages)
            solved, mean = fused.solve(kernel, A, average, rho=self.rho, paper=paper, number=number)
            return groups.by_sequence(solved.flatten()), mean
        mean = kernel.diagonal(dim1=1, dim2=2).sum() / len(advantages)
        c = self.rho * (mean if average is None else average.to(mean)).double()
        solved = mixed_advantages(kernel, A, c)
        if self.scale == "paper":
            solved = torch.where(c > 0, solved / torch.where(c > 0, c, 1.0), 0.0)
        return groups.by_sequence(solved.flatten()).to(advantages.dtype), mean


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

    scale: "paper" is U as above; "c" multiplies it by c, which bounds it by REINFORCE (its limit
        for large c).
    group_by: the sequences that interact: the micro-batch, or those of one prompt (pass `groups`
        to `applied`).

    rho: ρ, the damping in units of the mean squared length
    path: form in which the kernel is computed; all agree
    """
    if not (math.isfinite(rho) and rho > 0):
        raise ProxpoError(f"isopo_ntk: rho must be a finite number > 0, got {rho}")
    return Transform(
        Ntk(
            rho=rho,
            scale=resolve(scale, ("c", "paper"), what="scale of isopo_ntk"),
            group_by=resolve(group_by, ("microbatch", "prompt"), what="group_by of isopo_ntk"),
            path=resolve(path, ("auto", "gram", "materialise"), what="path of isopo_ntk"),
        )
    )
