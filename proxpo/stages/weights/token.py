"""Weights that single out tokens by probability or entropy, and one weight for all."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.extremes import batch_quantile, top_share
from proxpo.ops.masked import count, masked_mean
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import AllSum, Batch, Context, PerToken, Scope, local


@stage("weights")
def constant(*, factor: float = 1.0):
    """The same factor on the policy loss of every token; regularisers keep their own.

    factor: the weight
    """
    check_numbers("constant", "(-inf, inf)", factor=factor)

    def weights(batch: Batch, ctx: Context) -> PerToken:
        return torch.full_like(batch.logp, factor), {}

    return weights


@stage("weights", needs=("old_logp",))
def probability_reweight(*, alpha: float = 0.3):
    """α·p + (1-α) with p = π_old of the token: rare tokens weigh less. AR, arXiv:2505.12929.

    alpha: α; 0 weighs all tokens alike
    """
    if not 0 <= alpha <= 1:
        raise ProxpoError(f"weights=probability_reweight: alpha must be in [0, 1], got {alpha}")

    def weights(batch: Batch, ctx: Context) -> PerToken:
        return alpha * batch.old_logp.detach().exp() + (1 - alpha), {}

    return weights


@stage("weights", needs=("entropy",))
def top_entropy(
    *,
    share: float = 0.2,
    normalise: Literal["selected", "all"] = "selected",
    rule: Literal["top_k", "quantile"] = "top_k",
    scope: Scope = "batch",
):
    """Keeps the top `share` of tokens by entropy. arXiv:2506.01939 eq. 6.

    K = max(1, ⌈share·N⌉) of N valid tokens (rule="top_k"; tokens that tie for the last places
    share them), or those with entropy at or above the interpolated quantile (rule="quantile", TRL).
    normalise="selected" divides the loss by the K selected tokens (weight N/K under a token mean);
    "all" by all N.

    share: share of the tokens that is kept
    normalise: divide by the "selected" tokens or by "all"
    rule: exactly the "top_k", or all from the "quantile" on
    scope: "batch": N tokens of the whole optimizer step; "microbatch": of each micro-batch
    """
    if not 0 < share <= 1:
        raise ProxpoError(f"weights=top_entropy: share must be in (0, 1], got {share}")

    def weights(batch: Batch, ctx: Context) -> PerToken:
        all_sum = ctx.all_sum if scope == "batch" else local
        chosen = _top(batch.entropy.detach(), batch.mask, share, rule, all_sum)
        metrics = {"weights/selected": masked_mean(chosen, batch.mask)}
        if normalise == "all":
            return chosen, metrics
        n, k = ctx.all_sum(torch.stack([count(batch.mask), chosen.double().sum()]))
        return chosen * (n / k.clamp(min=1)).to(chosen.dtype), metrics

    return weights


def _top(
    entropy: Float[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    share: float,
    rule: str,
    all_sum: AllSum,
) -> Float[Tensor, "seq tok"]:
    if rule == "quantile":
        bound = batch_quantile(entropy, mask, 1 - share, all_sum=all_sum)
        return (mask & (entropy >= bound)).to(entropy.dtype)
    n = int(all_sum(count(mask)))
    k = min(max(1, math.ceil(share * n - 1e-9)), n)  # 0.2 · 5 is 1.0000000000000002 in binary
    return top_share(entropy, mask, k, all_sum=all_sum)
