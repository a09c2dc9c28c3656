"""Weights that keep the tokens of highest entropy within a response."""

from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.fields import declare_field
from proxpo.ops.masked import masked_mean, row_quantile
from proxpo.ops.shapes import Bool, Tensor
from proxpo.stages import Parts, stage
from proxpo.types import Batch, Context, PerToken

declare_field(
    "gate",
    "seq tok",
    kind="bool",
    doc="1 where a token's entropy lets its loss through; set by weights=entropy_gate",
)


def entropy_gates(batch: Batch, *, share: float) -> Bool[Tensor, "seq tok"]:
    """H_it ≥ the (1 - share) quantile of the response's own entropies, on valid tokens."""
    entropy = batch.require("entropy", by="weights=entropy_gate").detach()
    bound = row_quantile(entropy, batch.mask, 1 - share)
    return batch.mask & (entropy >= bound[:, None])


@stage("weights", needs=("entropy",))
def entropy_gate(*, share: float = 0.2, normalise: Literal["all", "gated"] = "all"):
    """1 on the tokens whose entropy is in the top `share` of their response, else 0.

    The quantile is interpolated and ties at it stay. Found once per rollout, from the entropies of
    the policy that starts it. normalise="all" leaves the divisor; "gated" divides by the gated
    tokens under a token mean. EARL, reconstructed from the abstract, arXiv:2511.12033.
    """
    if not 0 <= share <= 1:
        raise ProxpoError(f"entropy_gate: share must be in [0, 1], got {share}")

    def prepare(batch: Batch) -> dict[str, Tensor]:
        return {"gate": entropy_gates(batch, share=share)}

    def weights(batch: Batch, ctx: Context) -> PerToken:
        gate = batch.require("gate", by="weights=entropy_gate")
        weight = gate.to(batch.logp.dtype)
        if normalise == "gated":
            chosen = ctx.all_sum((gate & batch.mask).sum().double()[None])[0]
            weight = weight * (ctx.counts.tokens / chosen.clamp(min=1)).to(weight.dtype)
        return weight, {"weights/selected": masked_mean(gate, batch.mask)}

    return Parts(apply=weights, prepare=prepare)
