"""One ratio per token."""

import math
from typing import Literal, cast

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.bounds import hold_within
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio.proximal import PROXIMAL, Proximal, proximal_logp, proximal_needs
from proxpo.types import Batch, Context, PerToken

Anchor = Literal["old", "rollout", "ref", "prox"]
ANCHORS = {"old": "old_logp", "rollout": "rollout_logp", "ref": "ref_logp", "prox": "prox_logp"}


def check_limit(limit: float, *, stage: str) -> None:
    """Refuses a bound on the log-ratio that leaves no ratio but one."""
    if not limit > 0:
        raise ProxpoError(f"ratio={stage}: limit must be positive, got {limit:g}")


def bounded_exp(log_ratio: Float[Tensor, "*shape"], limit: float) -> Float[Tensor, "*shape"]:
    """exp of the log-ratio held within ±limit; beyond it the ratio is constant, its gradient 0."""
    return (hold_within(log_ratio, limit) if limit < math.inf else log_ratio).exp()


@stage("ratio", gives="ratio")
def token(*, anchor: Anchor | Proximal = "old", limit: float = 20.0, smooth: float = 0.0):
    """r_t = exp(log π - log π_anchor), the log-ratio held within ±limit (verl: 20).

    anchor: old, rollout, ref, prox, or a proximal policy computed on the spot (recompute, a3po,
    areal, linear; see proximal_logp)
    limit: bound on the log-ratio, in either direction
    smooth: ε of π/(π_anchor + ε), as the 2019 code of P3O has it
    """
    check_limit(limit, stage="token")
    check_numbers("token", "[0, inf)", smooth=smooth)

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        if anchor in PROXIMAL:
            other = proximal_logp(batch, prox=cast(Proximal, anchor))
        else:
            other = getattr(batch, ANCHORS[anchor]).detach()
        other = (other.exp() + smooth).log() if smooth else other
        return bounded_exp(batch.logp - other, limit), {}

    proximal = anchor in PROXIMAL
    needs = proximal_needs(cast(Proximal, anchor)) if proximal else (ANCHORS[anchor],)
    return Parts(apply=ratio, needs=needs)


@stage("ratio", gives="no ratio")
def none():
    """No ratio: the data are taken as drawn from the current policy."""

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        return torch.ones((), dtype=batch.logp.dtype, device=batch.logp.device).expand_as(
            batch.logp
        ), {}

    return ratio


@stage("ratio", needs=("ref_logp",), gives="log_ratio")
def log_ratio_to_ref():
    """log π - log π_ref per token, for losses that compare whole responses."""

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        return batch.logp - batch.ref_logp.detach(), {}

    return ratio
