"""KL penalties weighted by 1 - ESS: 0 on fresh data, stronger on stale data."""

from typing import Literal

import torch

from proxpo.ops.kl import kl_estimate, kl_exact
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.trust.ess import EpsIn, ess, two_ess
from proxpo.types import Batch, Context, PerToken, Scope


@stage("regularisers", needs=("old_logp",), takes=("ratio",))
def ess_kl_from_old(*, scope: Scope = "batch", eps: float = 1e-8, eps_in: EpsIn = "squares"):
    """(1 - ESS)·[x + e^{-x} - 1], x = log π - log π_old: P3O's pull to the behaviour policy.

    The exponent is held within ±10, as the official code does. ESS is that of the ratio in use.

    scope: "batch": ESS of the whole optimizer step; "microbatch": of each micro-batch
    eps: added to Σ r², or to the count
    eps_in: place of eps: with the "squares", or the "count" as in 2019
    """
    check_numbers("ess_kl_from_old", "[0, inf)", eps=eps)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        size = ess(ratio, batch.mask, eps=eps, eps_in=eps_in, all_sum=ctx.all_sum, scope=scope)
        kl = kl_estimate(batch.logp, batch.old_logp.detach(), clamp="p3o")
        return (1 - size) * kl, {"kl/old": masked_mean(kl.detach(), batch.mask)}

    return penalty


@stage("regularisers", needs=("old_logp", "prox_logp"), takes=("ratio",))
def two_anchor_kl(*, scope: Scope = "batch", eps: float = 1e-8):
    """(1 - min(ESS_b, ESS_p))·KL(π‖π_mix), π_mix the anchors weighted by staleness. P4O.

    log π_mix = log[(w_b π_b + w_p π_p)/(w_b + w_p)], w = 1 - ESS; nothing when both are fresh.

    scope: "batch": ESS of the whole optimizer step; "microbatch": of each micro-batch
    eps: added to Σ r²
    """
    check_numbers("two_anchor_kl", "[0, inf)", eps=eps)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        behaviour, proximal = two_ess(ratio, batch, ctx, scope=scope, eps=eps)
        w_b, w_p = (1 - behaviour).clamp(min=0), (1 - proximal).clamp(min=0)
        strength = 1 - torch.minimum(behaviour, proximal)
        awake = strength > 1e-6
        log_total = (w_b + w_p).clamp(min=1e-30).log()
        log_b = torch.where(awake, (w_b + 1e-30).log() - log_total, 0.0)
        log_p = torch.where(awake, (w_p + 1e-30).log() - log_total, -torch.inf)
        mix = torch.logaddexp(log_b + batch.old_logp.detach(), log_p + batch.prox_logp.detach())
        kl = kl_estimate(batch.logp, mix, clamp="p3o")
        metrics = {"kl/mix": masked_mean(kl.detach(), batch.mask)}
        return torch.where(awake, strength, 0.0) * kl, metrics

    return penalty


@stage("regularisers", needs=("old_logp", "vocab_logp", "old_vocab_logp"), takes=("ratio",))
def ess_kl_full(
    *,
    direction: Literal["beta_pi", "pi_beta"] = "beta_pi",
    mean_over_actions: bool = False,
    scope: Scope = "batch",
    eps: float = 1e-7,
    eps_in: EpsIn = "count",
):
    """(1 - ESS)·KL over the whole vocabulary, as the 2019 P3O has it.

    direction="beta_pi": KL(π_β‖π), the paper's; "pi_beta": KL(π‖π_β), the code's.
    mean_over_actions=True divides by the size of the vocabulary, as the code does.

    direction: KL(π_β‖π) ("beta_pi"), or the other way
    mean_over_actions: divide by the size of the vocabulary
    scope: "batch": ESS of the whole optimizer step; "microbatch": of each micro-batch
    eps: added to Σ r², or to the count
    eps_in: place of eps: with the "squares", or the "count" as in 2019
    """
    check_numbers("ess_kl_full", "[0, inf)", eps=eps)

    def penalty(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        size = ess(ratio, batch.mask, eps=eps, eps_in=eps_in, all_sum=ctx.all_sum, scope=scope)
        pi, beta = batch.vocab_logp, batch.old_vocab_logp.detach()
        first, second = (beta, pi) if direction == "beta_pi" else (pi, beta)
        kl = kl_exact(first, second) / (pi.shape[-1] if mean_over_actions else 1)
        return (1 - size) * kl, {"kl/old": masked_mean(kl.detach(), batch.mask)}

    return penalty
