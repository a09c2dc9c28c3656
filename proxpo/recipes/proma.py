from typing import Literal

from proxpo.recipes._registry import register
from proxpo.recipes.isopo import with_gradient
from proxpo.stages import make_stage
from proxpo.types import Recipe


@register("proma", paper="arXiv:2601.10498")
def proma(
    *,
    variant: Literal["accumulation", "intra", "both"] = "accumulation",
    solver: Literal["exact", "solve", "sweep"] = "solve",
    sigma: float = 1.0,
    rho: float | None = 0.5,
    ridge: float = 0.01,
    dim: int = 30,
    intra_sigma: float = 1.0,
    bases: Literal["random", "exact"] = "random",
) -> Recipe:
    """PROMA: micro-batches accumulated so that a new one is not undone by those before it.

        R ← R - σ P + G_b,   P = projection of R onto span{V_i : i ∈ b},   |P| ≤ ρ|G_b|
        G_b = Σ_{i∈b} A_i V_i,   V_i = ∂ log π(o_i)/∂W, layer by layer

    With one micro-batch it is REINFORCE: set train.micro_batch. variant="intra" removes instead,
    within each micro-batch, the dominant subspaces of the layer's inputs and output gradients.

    Departures: solver="exact" is the paper's orthogonal projection; the ridge and the bound ρ are
    the released code's. The later simultaneous sweep, which diverges, is not offered.

    dim, intra_sigma, bases: rank and share of what intra removes; bases by a randomised range
        finder ("random") or by SVD ("exact")

    Reference: Abrahamsen, arXiv:2601.10498.
    """
    options = {"variant": variant, "solver": solver, "sigma": sigma, "rho": rho, "ridge": ridge}
    further = {"dim": dim, "intra_sigma": intra_sigma, "bases": bases}
    return with_gradient(make_stage("gradient", "proma", **options, **further))
