from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages import make_stage
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_sum
from proxpo.stages.ratio import none
from proxpo.stages.trust import score_function
from proxpo.types import Recipe, Stage

Preset = Literal["fisher", "nearest-npg", "figure4", "euclidean", "reinforce"]


def with_gradient(transform: Stage) -> Recipe:
    """REINFORCE on GRPO's advantages, summed over tokens, under a gradient transform."""
    return Recipe(
        advantage=group_relative(),
        ratio=none(),
        trust=score_function(),
        aggregate=token_sum(),
        gradient=transform,
    )


@register("isopo", paper="arXiv:2512.23353")
def isopo(
    *,
    p: float | None = None,
    q: float | None = None,
    r: float | None = None,
    reg: float = 0.0,
    overlap_reg: float | None = None,
    norm_reg: float | None = None,
    rel_overlap_reg: float | None = None,
    keep_small: bool = False,
    overlap: int | Literal["all"] = 64,
    scale: Literal["sum", "mean"] = "sum",
    scope: Literal["layer", "head"] = "layer",
    preset: Preset | None = None,
) -> Recipe:
    """ISOPO: each sequence's gradient, layer by layer, scaled by a power of its Fisher length.

        U = Σ_i A_i s_i V_i,   s_i = F_i^p · N_i^q · R_i^r,   V_i = ∂ log π(o_i)/∂W
        F_i² = Σ_{j∈J} ⟨V_i, G_j⟩² / Σ_{j∈J} |G_j|²,   N_i = |V_i|,   R_i = F_i/N_i

    No old policy, no ratio, no clip; one backward pass. Presets: fisher (p=-1), nearest-npg (r=-2),
    figure4 (q=-1, r=-2), euclidean (q=-1). `inspect` shows s = 1, since F needs the model. reg adds
    its multiple of E[x²] to the square of each length x; overlap_reg (F), norm_reg (N) and
    rel_overlap_reg (R) set it for one of them.

    keep_small: divide by √(reg E[x²]) too, which leaves short gradients as they are

    Departures: norms, biases, embeddings and tied heads are treated like linear weights, where the
    released code trains them without advantages, zeroes or drops them. overlap is 64, theirs 250.

    Reference: Abrahamsen, arXiv:2512.23353 eq. 6 and section 2.
    """
    strengths = {"overlap_reg": overlap_reg, "norm_reg": norm_reg}
    strengths |= {"reg": reg, "rel_overlap_reg": rel_overlap_reg}
    options = {"p": p, "q": q, "r": r, "keep_small": keep_small, "overlap": overlap, **strengths}
    names = {"scale": scale, "scope": scope, "preset": preset}
    return with_gradient(make_stage("gradient", "isopo", **options, **names))
