"""Weights of denoising steps."""

from collections.abc import Mapping
from typing import Any, Literal

from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.ratio.gaussian import SMALLEST
from proxpo.types import Batch, Context, Metrics

Result = tuple[Float[Tensor, "seq tok"], Metrics]


def _needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("step_size", "time") if options["noise_schedule"] == "dance" else ("step_size",)


@stage("weights", needs=_needs)
def inverse_step(*, noise_schedule: Literal["flow", "dance"] = "flow", eta: float = 0.3):
    """δ_t = 1/Δt, or (1 + η²(1-t)/(2t))/Δt where σ_t = η ("dance"). GRPO-Guard, arXiv:2510.22319.

    "flow" is Flow-GRPO's σ_t = η√(t/(1-t)). Δt and t are held above 1e-6.
    """

    def weights(batch: Batch, ctx: Context) -> Result:
        weight = 1 / batch.step_size.clamp(min=SMALLEST)
        if noise_schedule == "dance":
            t = batch.time.clamp(min=SMALLEST)
            weight = weight * (1 + eta**2 * (1 - t) / (2 * t))
        return weight, {}

    return weights
