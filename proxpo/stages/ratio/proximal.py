"""Log-probabilities of the proximal policy, the denominator of a decoupled ratio."""

from typing import Literal, get_args

import torch

from proxpo.ops.shapes import Float, Tensor
from proxpo.types import Batch

Proximal = Literal["recompute", "a3po", "areal", "linear"]
PROXIMAL = get_args(Proximal)


def proximal_needs(prox: Proximal) -> tuple[str, ...]:
    return ("old_logp", "prox_logp") if prox == "recompute" else ("old_logp", "lag")


def proximal_logp(batch: Batch, *, prox: Proximal) -> Float[Tensor, "seq tok"]:
    """log π_p, detached. ℓ_b = old_logp is the sampling policy, d = lag in policy versions.

    recompute  prox_logp, a forward pass at the start of the step
    a3po       α ℓ_b + (1-α) ℓ, α = 1/d for d ≥ 1 and 0 for d = 0 (arXiv:2512.06547)
    areal      the same, but ℓ_b for d = 0 (the released code)
    linear     log((1-a) π_b + a π + 1e-10), a = (d-1)/d and 0 for d = 0
    """
    if prox == "recompute":
        return batch.prox_logp.detach()
    behaviour, current = batch.old_logp.detach(), batch.logp.detach()
    lag = batch.lag.to(current.dtype)
    if prox == "linear":
        share = ((lag - 1) / lag.clamp(min=1)).clamp(min=0)
        return ((1 - share) * behaviour.exp() + share * current.exp() + 1e-10).log()
    at_zero = 0.0 if prox == "a3po" else 1.0
    alpha = torch.where(lag >= 1, 1 / lag.clamp(min=1), at_zero)
    return alpha * behaviour + (1 - alpha) * current
