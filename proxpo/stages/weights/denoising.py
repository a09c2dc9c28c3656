"""Weights of denoising steps."""

from typing import Literal

from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.gaussian import SMALLEST
from proxpo.types import Batch, Context, PerToken


@stage("weights")
def inverse_step(*, noise_schedule: Literal["flow", "dance"] = "flow", eta: float = 0.3):
    """δ_t = 1/Δt, or (1 + η²(1-t)/(2t))/Δt where σ_t = η ("dance"). GRPO-Guard, arXiv:2510.22319.

    "flow" is Flow-GRPO's σ_t = η√(t/(1-t)). Δt and t are held above 1e-6.

    noise_schedule: σ_t of Flow-GRPO ("flow") or a constant one ("dance")
    eta: η of noise_schedule="dance"
    """
    check_numbers("inverse_step", "[0, inf)", eta=eta)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        weight = 1 / batch.step_size.clamp(min=SMALLEST)
        if noise_schedule == "dance":
            t = batch.time.clamp(min=SMALLEST)
            weight = weight * (1 + eta**2 * (1 - t) / (2 * t))
        return weight, {}

    if noise_schedule == "flow":
        return Parts(apply=weights, needs=("step_size",), idle=("eta",))
    return Parts(apply=weights, needs=("step_size", "time"))
