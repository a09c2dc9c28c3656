"""`score_features`: mean gradient of a response's log-probabilities in its last hidden states."""

import torch

from proxpo.logp._token import token_logp
from proxpo.ops.shapes import Bool, Float, Int, Tensor


def score_features(
    hidden: Float[Tensor, "seq tok dim"],
    head_weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "seq tok"],
    mask: Bool[Tensor, "seq tok"],
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Float[Tensor, "seq dim"]:
    """Φ = (1/L) Σ_t φ_t,  φ_t = W[y_t] - Σ_v p_t(v) W[v] = τ · d log p(y_t)/dh_t.  G2RL's feature.

    hidden: the states that produced the distributions of `targets`. The logits exist one tile at a
    time, as in `token_logp`. Detached, in float32 (float64 for float64 input); 0 for a response
    without tokens. arXiv:2512.15687.
    """
    with torch.enable_grad():
        states = hidden.detach().requires_grad_()
        logp = token_logp(
            states,
            head_weight.detach(),
            targets,
            bias=None if bias is None else bias.detach(),
            mask=mask,
            temperature=temperature,
            softcap=softcap,
            chunk=chunk,
        )
        (slope,) = torch.autograd.grad(logp.sum(), states)
    precise = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return temperature * torch.where(mask[..., None], slope, 0.0).sum(1, dtype=precise) / count
