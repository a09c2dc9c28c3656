from typing import Literal

from proxpo.recipes._registry import register
from proxpo.recipes.isopo import with_gradient
from proxpo.stages import make_stage
from proxpo.types import Recipe


@register("isopo-ntk", paper="arXiv:2512.23353")
def isopo_ntk(
    *,
    rho: float = 1.0,
    scale: Literal["c", "paper"] = "c",
    group_by: Literal["microbatch", "prompt"] = "microbatch",
) -> Recipe:
    """ISOPO-NTK: per layer the advantages become (K + cI)⁻¹A, K the kernel of sequence gradients.

        U = Σ_i Ã_i V_i,   Ã = (K + cI)⁻¹ A,   K_ij = ⟨V_i, V_j⟩,   c = ρ E[tr K / m]

    The damped natural gradient of each layer within the span of the micro-batch's sequences.
    scale="paper" leaves out the factor c, which the released code has.

    Departures: no absolute 1e-8 beside c, which at a token-mean scale would swamp the kernel.

    Reference: Abrahamsen, arXiv:2512.23353 section 3.
    """
    return with_gradient(
        make_stage("gradient", "isopo_ntk", rho=rho, scale=scale, group_by=group_by)
    )
