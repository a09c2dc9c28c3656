"""Selection of tokens by their probability."""

from typing import Literal

from proxpo.ops.extremes import batch_quantile
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken


@stage("select", needs=("old_logp",))
def probability_split(
    *,
    threshold: float = 0.5,
    part: Literal["low", "high"] = "low",
    rule: Literal["probability", "quantile"] = "probability",
):
    """1 on tokens with π_old < threshold (part="low") or ≥ threshold ("high"): Lopti's two passes.

    rule="quantile": the threshold is a quantile of π_old over the valid tokens of the whole step.

    threshold: probability, or quantile, that separates the parts
    part: tokens that are kept: "low" or "high"
    rule: threshold as a "probability" or a "quantile"
    """
    check_numbers("probability_split", "[0, 1]", threshold=threshold)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        p = batch.old_logp.detach().exp()
        bound: Tensor | float = threshold
        if rule == "quantile":
            bound = batch_quantile(p, batch.mask, threshold, all_sum=ctx.all_sum)
        chosen = p < bound if part == "low" else p >= bound
        return chosen.to(p.dtype), {f"select/{part}": masked_mean(chosen, batch.mask)}

    return weights


__all__ = ["probability_split"]
