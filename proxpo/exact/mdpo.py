"""Mirror descent in closed form, and the losses of its off-policy variant. arXiv:2005.09814."""

import torch

from proxpo.ops.shapes import Float, Tensor


def mirror_step(
    old_logp: Float[Tensor, "*state action"], advantages: Float[Tensor, "*state action"], t: float
) -> Float[Tensor, "*state action"]:
    """log π of the exact step, π ∝ π_old·exp(t A): argmax of ⟨π, A⟩ - KL(π‖π_old)/t."""
    return torch.log_softmax(old_logp + t * advantages, dim=-1)


def off_policy_actor_loss(
    logp: Float[Tensor, " state"],
    old_logp: Float[Tensor, " state"],
    q: Float[Tensor, " state"],
    *,
    kappa: float = 1.0,
    lam: float = 0.2,
    mean: Float[Tensor, "state action"] | None = None,
    log_std: Float[Tensor, "state action"] | None = None,
    head_coef: float = 1e-3,
) -> Float[Tensor, ""]:
    """E[κ log π(a|s) - (κ-λ) log π_k(a|s) - Q(s, a)], a reparameterised from π, κ = λ + 1/t.

    π_k is the policy of the last refresh, as a function of the action: `old_logp` may carry
    gradient through a, and so may q (one critic, Q1). κ = λ is SAC's actor loss. `mean` and
    `log_std` of a Gaussian head add head_coef·(mean² + log_std²), averaged.
    """
    loss = (kappa * logp - (kappa - lam) * old_logp - q).mean()
    for head in (mean, log_std):
        if head is not None:
            loss = loss + head_coef * head.square().mean()
    return loss


def off_policy_value_target(
    q1: Float[Tensor, " state"],
    q2: Float[Tensor, " state"],
    logp: Float[Tensor, " state"],
    *,
    lam: float = 0.2,
) -> Float[Tensor, " state"]:
    """V(s) ← min(Q1, Q2)(s, a) - λ log π(a|s), without gradient."""
    return (torch.minimum(q1, q2) - lam * logp).detach()
