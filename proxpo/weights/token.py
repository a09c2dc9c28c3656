"""Weights that single out tokens by probability or entropy."""

import math
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.masked import masked_mean
from proxpo.shapes import Bool, Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics

Result = tuple[Float[Tensor, "seq tok"], Metrics]


@stage("weights", needs=("old_logp",))
def probability_reweight(*, alpha: float = 0.3):
    """α·p + (1-α) with p = π_old of the token: rare tokens weigh less. AR, arXiv:2505.12929."""
    if not 0 <= alpha <= 1:
        raise ProxpoError(f"weights=probability_reweight: alpha must be in [0, 1], got {alpha}")

    def weights(batch: Batch, ctx: Context) -> Result:
        return alpha * batch.old_logp.detach().exp() + (1 - alpha), {}

    return weights


@stage("select", needs=("old_logp",))
def probability_split(
    *,
    threshold: float = 0.5,
    part: Literal["low", "high"] = "low",
    rule: Literal["probability", "quantile"] = "probability",
):
    """1 on tokens with π_old < threshold (part="low") or ≥ threshold ("high"): Lopti's two passes.

    rule="quantile": the threshold is a quantile of π_old over the valid tokens of the micro-batch.
    """

    def weights(batch: Batch, ctx: Context) -> Result:
        p = batch.old_logp.detach().exp()
        bound: Tensor | float = threshold
        if rule == "quantile" and batch.mask.any():
            bound = quantile(p[batch.mask], threshold)
        chosen = p < bound if part == "low" else p >= bound
        return chosen.to(p.dtype), {f"select/{part}": masked_mean(chosen, batch.mask)}

    return weights


@stage("weights", needs=("entropy",), whole_batch=False)
def top_entropy(
    *,
    share: float = 0.2,
    normalize: Literal["selected", "all"] = "selected",
    rule: Literal["top_k", "quantile"] = "top_k",
):
    """Keeps the top `share` of tokens by entropy. arXiv:2506.01939 eq. 6.

    K = max(1, ⌈share·N⌉) of the N valid tokens of the micro-batch (rule="top_k"), or those with
    entropy at or above the interpolated quantile (rule="quantile", TRL). normalize="selected"
    divides the loss by the K selected tokens (weight N/K under a token mean); "all" by all N.
    """
    if not 0 < share <= 1:
        raise ProxpoError(f"weights=top_entropy: share must be in (0, 1], got {share}")

    def weights(batch: Batch, ctx: Context) -> Result:
        chosen = _top(batch.entropy.detach(), batch.mask, share, rule)
        counts = torch.stack([batch.mask.sum(), chosen.sum()]).to(batch.logp.dtype)
        n, k = ctx.all_sum(counts)
        factor = n / k.clamp(min=1) if normalize == "selected" else torch.ones_like(n)
        return chosen * factor, {"weights/selected": masked_mean(chosen, batch.mask)}

    return weights


def _top(
    entropy: Float[Tensor, "seq tok"], mask: Bool[Tensor, "seq tok"], share: float, rule: str
) -> Bool[Tensor, "seq tok"]:
    n = int(mask.sum())
    if n == 0:
        return torch.zeros_like(mask)
    if rule == "quantile":
        return mask & (entropy >= quantile(entropy[mask], 1 - share))
    k = max(1, math.ceil(share * n - 1e-9))  # 0.2 · 5 is 1.0000000000000002 in binary
    rank = torch.where(mask, entropy, -torch.inf).flatten().topk(k, sorted=False).indices
    chosen = torch.zeros_like(mask).flatten()
    chosen[rank] = True
    return chosen.view_as(mask)


def quantile(x: Float[Tensor, " n"], q: float) -> Float[Tensor, ""]:
    """Linearly interpolated quantile, for any number of entries (torch.quantile stops at 2²⁴)."""
    ordered = x.sort().values
    place = q * (len(ordered) - 1)
    low = min(max(math.floor(place), 0), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)
