from typing import Literal

from proxpo.recipes._registry import Procedure, register


@register("tabnas", paper="arXiv:2204.07615", domains=("architecture",))
def tabnas(
    *,
    controller_lr: float = 0.1,
    draws: int = 5,
    momentum: float = 0.9,
    correction: Literal["estimated", "exact", "none", "tf2", "pytorch"] = "estimated",
    penalty: float = 0.0,
) -> Procedure:
    """TabNAS: rejects infeasible samples and takes probabilities given feasibility.

        y ~ P; infeasible: discarded, nothing moves; else
        loss = -sg(Q(y) - Q̄) · [log P(y) - log P̂(V)],   Q̄ a moving average, bias-corrected
        P̂(V) = (1/N) Σ_k 1{z_k ∈ V} p(z_k)/sg(p(z_k)),   z_k ~ P

    P(y) = Π_l softmax(θ_l)[y_l]. correction="exact" enumerates P(V); "none" is REINFORCE on
    feasible samples, which descends another objective. "tf2" and "pytorch" are the denominators of
    the two released notebooks, kept as negative controls: Σ p(z_k) over feasible samples, which
    estimates nothing, with and without a gradient (the second also never clears its gradients).
    penalty > 0: no rejection, Q - penalty·|T/T0 - 1| instead, as the baseline "Abs reward" has it.

    No update where no z_k is feasible. Language models have the same correction as
    regularisers=feasible_share (docs/stages.md).

    controller_lr: learning rate of the controller
    draws: N, the samples that estimate P(V)
    momentum: of the moving average Q̄
    correction: P(V): "estimated", "exact", "none", or as a released notebook
    penalty: weight of the cost in place of rejection; 0: rejection

    Departures: the shared-weight network that is trained along with the controller is left out: the
    toy's qualities are given.

    Reference: Yang et al., arXiv:2204.07615 section 4; google-research/tabnas.
    """
    counted = correction not in ("exact", "none") and not penalty
    return Procedure(
        ranges={
            "[0, inf)": ("controller_lr", "penalty"),
            "[1, inf)": ("draws",),
            "[0, 1)": ("momentum",),
        },
        idle=(*(() if counted else ("draws",)), *(("correction",) if penalty else ())),
    )
