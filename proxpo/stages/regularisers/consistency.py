"""Agreement of the policy under a folded context with itself under the whole history."""

from typing import Literal

import torch

from proxpo.ops.kl import kl_estimate
from proxpo.ops.masked import count, masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.folded import present
from proxpo.types import Batch, Clock, Context, PerToken


@stage("regularisers", needs=("full_logp",))
def context_consistency(
    *, coef: float = 1.0, estimator: Literal["k1", "k2", "k3"] = "k1", every: int = 100
):
    """coef · mean over the tokens of I of an estimate of KL(folded‖full). FoldAct, 2512.22733.

    d = log π - full_logp; I: tokens with a known full_logp. k1: d, whose gradient 1/|I| lowers
    every log-probability whatever full_logp is; k2: d²/2 and k3: e^{-d} - 1 + d pull towards it.
    every: steps between those that have this term, from step 0 on; the others need no full_logp.
    coef: weight of the term
    estimator: estimator of the KL: k1, k2 or k3
    """
    check_numbers("context_consistency", "[0, inf)", coef=coef)
    check_numbers("context_consistency", "[1, inf)", every=every)

    def acts(clock: Clock) -> bool:
        return clock.step % every == 0

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        if not acts(ctx.clock):
            return torch.zeros_like(batch.logp), {}
        inside = batch.mask & present(batch.full_logp)
        kl = kl_estimate(batch.logp, batch.full_logp.detach(), estimator=estimator)
        kl = torch.where(inside, kl, 0.0)
        total = ctx.all_sum(count(inside)[None])[0]
        factor = (coef * ctx.counts.tokens / total.clamp(min=1)).to(kl.dtype)
        mean = masked_mean(kl.detach(), inside, all_sum=ctx.all_sum)
        return factor * kl, {"kl/full": mean}

    return Parts(apply=penalty, acts=acts)
