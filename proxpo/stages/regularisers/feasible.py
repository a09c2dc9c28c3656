"""Rejected samples: probabilities given that a response is feasible. TabNAS, arXiv:2204.07615."""

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import declare_field
from proxpo.ops.masked import row_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.types import Batch, Context, PerToken

declare_field(
    "feasible",
    "seq",
    kind="bool",
    source="reward",
    doc="1 if the response is allowed, from a reward function that returns 'feasible'",
)
declare_field(
    "feasible_advantage",
    "seq",
    doc="mean advantage of the other feasible responses; set by regularisers=feasible_share",
)


@stage("regularisers", needs=("feasible", "group"))
def feasible_share():
    """+ Ā_{-k} · log π(o_k): turns log P(y) into log P(y) - log P̂(V), y given feasibility V.

    Where infeasible responses are thrown away (reward=feasible_only, or a constrained decoder that
    reports them), REINFORCE on the rest descends another objective than E[r | V] unless
    ∇ log P(V) is subtracted. Its unbiased estimate for response i is the mean of ∇ log π over the
    other feasible responses to the prompt; collected by response that is Ā_{-k}, the mean advantage
    of the others. A response without others gets no gradient. Advantages are per response. Where
    they add up to 0 over the feasible group (grpo, rloo) nothing is biased: the term then only
    scales the gradient by n/(n-1).
    """

    def prepare(batch: Batch) -> dict[str, Tensor]:
        feasible = batch.require("feasible", by="regularisers=feasible_share")
        inside = feasible & batch.mask.any(dim=1)
        spread = (batch.advantages - row_mean(batch.advantages, batch.mask)[:, None]).abs()
        if bool((spread * batch.mask > 1e-6 * (1 + batch.advantages.abs())).any()):
            raise ProxpoError("regularisers=feasible_share needs one advantage for each response")
        own = torch.where(inside, row_mean(batch.advantages, batch.mask), 0.0)
        _, index = batch.group.unique(return_inverse=True)
        total = torch.zeros_like(own).index_add(0, index, own)[index]
        size = torch.zeros_like(own).index_add(0, index, inside.to(own.dtype))[index]
        others = torch.where(size > 1, (total - own) / (size - 1).clamp(min=1), own)
        return {"feasible_advantage": torch.where(inside, others, 0.0)}

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        pull = batch.feasible_advantage[:, None] * ratio.detach()
        return pull * batch.logp, {}

    return Parts(apply=penalty, prepare=prepare)
