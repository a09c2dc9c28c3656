"""Trust regions set by the effective sample size of the batch."""

from typing import Literal

import torch

from proxpo.ops.masked import count, masked_mean
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.types import AllSum, Batch, Context, PerToken, Scope, local

EpsIn = Literal["squares", "count"]


def ess(
    ratio: Float[Tensor, "*anchor seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    eps: float = 1e-8,
    eps_in: EpsIn = "squares",
    all_sum: AllSum = local,
    scope: Scope = "batch",
) -> Float[Tensor, "*anchor"]:
    """Normalised effective sample size, ESS = (Σ r)² / (Σ r² + eps) / n, in (0, 1].

    1 when all ratios agree (on-policy); 1/n when one token carries the batch. Sums in float64, over
    ranks too. 1 when nothing is valid or a sum is not finite. eps_in="count" places eps as the 2019
    code does: ((Σ r)²/Σ r² + eps)/n.
    """
    r = torch.where(mask, ratio.detach(), 0.0).double()
    sums, norms = r.sum(dim=(-2, -1)), torch.linalg.vector_norm(r, dim=(-2, -1))
    n = count(mask).expand_as(sums)
    total, squares, n = all_sum(torch.stack([sums, norms.square(), n]), scope)
    if eps_in == "count":
        value = (total.square() / squares.clamp(min=torch.finfo(torch.float64).tiny) + eps) / n
    else:
        value = total.square() / (squares + eps) / n
    return value.nan_to_num(nan=1.0, posinf=1.0).to(ratio.dtype)


def capped_score(
    ratio: Float[Tensor, "seq tok"], cap: Float[Tensor, ""], batch: Batch
) -> tuple[Float[Tensor, "seq tok"], Tensor]:
    """-sg[min(r, cap)]·A·log π, and the share of capped tokens."""
    weight = torch.minimum(ratio.detach(), cap)
    return (-weight * batch.advantages) * batch.logp, masked_mean(ratio.detach() > cap, batch.mask)


@stage("trust", takes=("ratio",), gives="loss")
def ess_cap(
    *, scope: Scope = "batch", eps: float = 1e-8, eps_in: EpsIn = "squares", cap: bool = True
):
    """x = -sg[min(r, ESS)]·A·log π: the staler the batch, the lower the ceiling. P3O.

    The cap is ESS, never 1/ESS, which would loosen as data gets stale. scope="batch": ESS of the
    whole optimizer batch; "microbatch": of each micro-batch over the ranks, as the official code.
    cap=False: ceiling 1 (the 2019 code's default).

    scope: "batch": ESS of the whole optimizer step; "microbatch": of each micro-batch
    eps: added to Σ r², or to the count
    eps_in: place of eps: with the "squares", or the "count" as in 2019
    cap: ceiling ESS (true) or 1
    """
    check_numbers("ess_cap", "[0, inf)", eps=eps)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        size = ess(ratio, batch.mask, eps=eps, eps_in=eps_in, all_sum=ctx.all_sum, scope=scope)
        x, capped = capped_score(ratio, size if cap else torch.ones_like(size), batch)
        return x, {"ratio/ess": size, "trust/clipped": capped}

    return surrogate


@stage("trust", takes=("ratio",), gives="loss", needs=("prox_logp",))
def two_anchor_ess_cap(*, scope: Scope = "batch", eps: float = 1e-8):
    """x = -sg[min(r, min(ESS_b, ESS_p))]·A·log π: P4O's cap by the worse of two anchors.

    ESS_b is that of the ratio to the behaviour policy, ESS_p that of the ratio to `prox_logp`.

    scope: "batch": ESS of the whole optimizer step; "microbatch": of each micro-batch
    eps: added to Σ r²
    """
    check_numbers("two_anchor_ess_cap", "[0, inf)", eps=eps)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        behaviour, proximal = two_ess(ratio, batch, ctx, scope=scope, eps=eps)
        x, capped = capped_score(ratio, torch.minimum(behaviour, proximal), batch)
        return x, {"ratio/ess": behaviour, "ratio/ess_prox": proximal, "trust/clipped": capped}

    return surrogate


def two_ess(
    ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context, *, scope: Scope, eps: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """ESS of the ratios to the behaviour policy and to the proximal snapshot."""
    proximal = (batch.logp - batch.prox_logp).detach().exp()
    both = torch.stack([ratio.detach(), proximal])
    sizes = ess(both, batch.mask, eps=eps, all_sum=ctx.all_sum, scope=scope)
    return sizes[0], sizes[1]
