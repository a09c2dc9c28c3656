"""A KL penalty whose weight is a Lagrange multiplier. FixPO, arXiv:2312.05405."""

from typing import Literal

import torch

from proxpo.ops.extremes import batch_max
from proxpo.ops.kl import kl_estimate, kl_exact
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics, PerToken, State

KLStatistic = Literal["max", "mean"]
METRIC = {"max": "kl/old_max", "mean": "kl/old"}
BETAS, EPS = (0.9, 0.999), 1e-8  # Adam's, for the multiplier


@stage("regularisers")
def kl_dual(
    *,
    coef: float = 1.0,
    radius: float = 0.2,
    margin: float = 2.0,
    lr: float = 0.01,
    statistic: KLStatistic = "max",
    kl: Literal["exact", "sampled"] = "exact",
):
    """β·KL(π_old‖π), β rising while margin·stat(KL) > radius and falling below, never negative.

    kl="exact" is over the whole vocabulary, ∂KL/∂logits = π - π_old; "sampled" is r - 1 - log r on
    the drawn tokens, which bounds nothing. β starts at `coef` and moves by Adam at `lr`, after
    every optimizer step.

    coef: β at the start
    radius: size of the trust region
    margin: factor on the KL before it is compared with the radius
    lr: learning rate of β
    statistic: "max" or "mean" of the KL over tokens
    kl: "exact" over the vocabulary, or "sampled"
    """
    check_numbers("kl_dual", "[0, inf)", coef=coef, margin=margin, lr=lr)
    check_numbers("kl_dual", "(0, inf)", radius=radius)

    def init() -> State:
        zero = torch.zeros((), dtype=torch.float64)
        return {"coef": zero + coef, "m": zero, "v": zero, "t": zero}

    def step(batch: Batch, metrics: Metrics, ctx: Context) -> State:
        """One Adam step on β·(ε - C·KL), then β ≥ 0; metrics without the KL leave β as it is."""
        name, state = METRIC[statistic], ctx.state
        if name not in metrics:
            return state
        slope = radius - margin * float(metrics[name])
        t = state["t"] + 1
        m = BETAS[0] * state["m"] + (1 - BETAS[0]) * slope
        v = BETAS[1] * state["v"] + (1 - BETAS[1]) * slope**2
        move = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
        return {"coef": (state["coef"] - lr * move).clamp(min=0.0), "m": m, "v": v, "t": t}

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        divergence = divergence_from_old(batch, exact=kl == "exact")
        beta = float(ctx.state["coef"]) if "coef" in ctx.state else coef
        detached = divergence.detach()
        return beta * divergence, {
            "kl/old": masked_mean(detached, batch.mask, all_sum=ctx.all_sum, scope="microbatch"),
            "kl/old_max": batch_max(detached, batch.mask, all_sum=ctx.all_sum, scope="microbatch"),
            "kl/beta": detached.new_full((), beta),
        }

    needs = ("vocab_logp", "old_vocab_logp") if kl == "exact" else ("old_logp",)
    return Parts(apply=penalty, init=init, step=step, needs=needs)


def divergence_from_old(batch: Batch, *, exact: bool) -> Float[Tensor, "seq tok"]:
    """KL(π_old‖π) per position: over the vocabulary, or r - 1 - log r on the drawn token."""
    if exact:
        return kl_exact(batch.old_vocab_logp.detach(), batch.vocab_logp)
    return kl_estimate(batch.old_logp.detach(), batch.logp)


__all__ = ["divergence_from_old", "kl_dual"]
