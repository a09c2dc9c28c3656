"""One line-searched natural-gradient step per rollout: TRPO, arXiv:1502.05477."""

from typing import Literal

import torch

from proxpo.exact.trpo import trpo_step
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.schedule._types import Updates
from proxpo.types import Context, Metrics, State


@stage("schedule", decides=("count", "parts", "optimizer", "loss"))
def line_search(
    *,
    delta: float = 0.01,
    damping: float = 0.1,
    cg_iterations: int = 15,
    cg_tolerance: float = 1e-10,
    shrink: float = 0.8,
    searches: int = 10,
    average: Literal["token", "sequence"] = "token",
):
    """max Σ w r A with Σ w KL(π_old‖π) < δ by conjugate gradients and backtracking, no optimizer.

    The surrogate is the importance-weighted one over the whole rollout, whatever the recipe's loss;
    its advantages and filters are the recipe's. Log-probabilities of the whole vocabulary are held
    at once: for small models and adapters. A step that the search refuses leaves the weights alone.
    Conjugate gradients stop at |g - (F + λI)x|² ≤ cg_tolerance · |g|², or after cg_iterations.

    delta: δ, the radius of the KL ball
    damping: λ, added to the Fisher matrix
    cg_iterations: conjugate-gradient steps at most
    cg_tolerance: squared residual, relative to |g|², at which they stop
    shrink: factor on the step after a failed trial
    searches: trials at most
    average: weights of the surrogate: per "token" or per "sequence"
    """
    check_numbers("line_search", "(0, inf)", delta=delta)
    check_numbers("line_search", "[0, inf)", damping=damping)
    check_numbers("line_search", "(0, 1)", shrink=shrink)
    check_numbers("line_search", "[0, 1)", cg_tolerance=cg_tolerance)
    check_numbers("line_search", "[1, inf)", cg_iterations=cg_iterations, searches=searches)

    def schedule(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        policy, samples = updates.exact()
        result = trpo_step(
            policy,
            samples,
            updates.batch().require("advantages", by="schedule=line_search"),
            delta=delta,
            damping=damping,
            cg_iterations=cg_iterations,
            cg_tolerance=cg_tolerance,
            shrink=shrink,
            searches=searches,
            average=average,
        )
        numbers = {
            "loss": -result.old_surrogate,
            "grad_norm": result.gradient_norm,
            "trust/accepted": float(result.accepted),
            "trust/shrinks": result.shrinks,
            "trust/gain": result.surrogate - result.old_surrogate,
            "kl/old": result.kl,
            "schedule/step_norm": float(result.step.norm()),
        }
        return {}, {name: torch.tensor(float(value)) for name, value in numbers.items()}

    return schedule


__all__ = ["line_search"]
