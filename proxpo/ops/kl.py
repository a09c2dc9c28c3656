"""Estimators of a KL divergence from the sampled token alone. d = log π - log π_other.

    name   value            ∂/∂log π       remark (tokens drawn from π)
    k1     d                1              unbiased value; as a loss it regularises nothing
    abs    |d|              sign d
    k2     d²/2             d              gradient of KL(π‖π_other), biased value
    k3     e^{-d} - 1 + d   1 - e^{-d}     unbiased value, gradient of KL(π_other‖π)
    k1+    k1               d              straight-through: the value of k1, the gradient of k2
    k3+    k3               d              straight-through: the value of k3, the gradient of k2

Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from typing import Any, Literal, get_args

import torch

from proxpo.errors import ProxpoError, nearest
from proxpo.ops.blocks import row_blocks
from proxpo.ops.bounds import hold_within
from proxpo.ops.shapes import Float, Tensor

Plain = Literal["k1", "abs", "k2", "k3", "kl", "mse", "low_var_kl"]
Through = Literal["k1+", "abs+", "k2+", "k3+", "kl+", "mse+", "low_var_kl+"]
Estimator = Plain | Through
NAMES = (*get_args(Plain), *get_args(Through))
Clamp = Literal["none", "verl", "openrlhf", "dr-grpo", "p3o"]
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(
    logp: Float[Tensor, "*shape"],
    other: Float[Tensor, "*shape"],
    *,
    estimator: str = "k3",
    clamp: str = "none",
) -> Float[Tensor, "*shape"]:
    """Per-token estimate of KL(π‖π_other), differentiable in `logp`.

    clamp="verl" bounds k3's exponent to ±20 and its value to ±10; "openrlhf" bounds the value of
    every estimator to ±10; "dr-grpo" bounds k3's exponent to ±40; "p3o" to ±10. The gradient of a
    bounded term is 0 outside.
    """
    if estimator not in NAMES:
        raise ProxpoError(f"unknown KL estimator '{estimator}'{nearest(estimator, NAMES)}")
    estimator = ALIASES.get(estimator, estimator)
    if clamp not in get_args(Clamp):
        raise ProxpoError(f"unknown KL clamp '{clamp}'{nearest(clamp, get_args(Clamp))}")
    if estimator.endswith("+"):
        value = kl_estimate(logp, other, estimator=estimator[:-1], clamp=clamp).detach()
        slope = kl_estimate(logp, other, estimator="k2", clamp=clamp)
        return value + slope - slope.detach()
    value = {
        "k1": lambda: logp - other,
        "abs": lambda: (logp - other).abs(),
        "k2": lambda: (logp - other).square() / 2,
        "k3": lambda: _k3(other - logp, clamp),
    }[estimator]()
    return hold_within(value, 10.0) if clamp == "openrlhf" else value


def kl_exact(
    logp: Float[Tensor, "*shape vocab"], other: Float[Tensor, "*shape vocab"]
) -> Float[Tensor, "*shape"]:
    """KL(π‖π_other) = Σ_a π (log π - log π_other) over the whole vocabulary; 0·log 0 = 0."""
    return _ExactKL.apply(*torch.broadcast_tensors(logp, other))


class _ExactKL(torch.autograd.Function):
    """`kl_exact`, without arrays as wide as the vocabulary beside its gradients."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(logp, other)
        out = logp.new_empty(logp.shape[:-1], dtype=torch.promote_types(logp.dtype, other.dtype))
        rows = [x.reshape(-1, x.shape[-1]) for x in (logp, other)]
        flat = out.view(-1)
        for part in row_blocks(len(flat), logp.shape[-1], logp.device):
            p = rows[0][part].exp()
            terms = (rows[0][part] - rows[1][part]).mul_(p).masked_fill_(p == 0, 0.0)
            torch.sum(terms, -1, out=flat[part])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        logp, other = ctx.saved_tensors
        p = logp.exp()
        if not ctx.needs_input_grad[0]:  # one array as wide as the vocabulary, not three
            return None, p.to(grad.dtype).mul_(-grad[..., None])
        weighted = p * grad[..., None]
        slope = torch.where(p == 0, 0.0, weighted * (logp - other + 1))
        return slope, -weighted if ctx.needs_input_grad[1] else None


def _k3(e: Tensor, clamp: str) -> Tensor:
    """exp(e) - 1 - e of the reversed log-ratio e = -d."""
    if clamp == "verl":
        e = hold_within(e, 20.0)
        return hold_within(torch.expm1(e) - e, 10.0)
    limit = {"dr-grpo": 40.0, "p3o": 10.0}.get(clamp)
    return torch.expm1(e if limit is None else hold_within(e, limit)) - e
