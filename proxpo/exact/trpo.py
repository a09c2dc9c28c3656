"""Trust region policy optimization, arXiv:1502.05477, for models small enough to afford it.

    max_θ  L(θ) = Σ w_t exp(log π_θ - log π_old) A     with   D(θ) = Σ w_t KL(π_old ‖ π_θ) < δ

Conjugate gradients on Fisher-vector products give the natural-gradient direction, a closed-form
scale puts it on the edge of the ball, and backtracking enforces the true KL and an improvement.
The old policy is the model as it stands; it is written to only when a step is accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.func import jvp

from proxpo.errors import ProxpoError, resolve
from proxpo.exact.npg import edge
from proxpo.exact.policy import ActionBatch, FlatPolicy, pull, token_kl
from proxpo.ops.shapes import Float, Tensor

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TrpoStep:
    """Result of one step; `reason` says why no step was taken, and is empty for an accepted one."""

    accepted: bool
    step: Float[Tensor, " param"]
    kl: float
    surrogate: float
    old_surrogate: float
    shrinks: int
    reason: str = ""
    gradient_norm: float = 0.0


def trpo_step(
    policy: FlatPolicy,
    samples: ActionBatch,
    advantages: Float[Tensor, "..."],
    *,
    delta: float = 0.01,
    damping: float = 0.1,
    cg_iterations: int = 15,
    cg_tolerance: float = 1e-10,
    shrink: float = 0.8,
    searches: int = 10,
    average: str = "token",
) -> TrpoStep:
    """One line-searched step, written into the model if accepted.

    Conjugate gradients stop at |g - M x|² ≤ cg_tolerance · |g|², or after cg_iterations.
    `advantages` of shape (seq,) or (seq, tok) are used as given: centre them first if that is
    wanted; their scale does not matter.
    """
    theta = policy.vector()
    weights = row_weights(samples, average)
    surrogate = surrogate_at(policy, samples, advantages, weights, theta)
    value, pullback = pull(surrogate, theta)
    gradient = pullback(torch.ones_like(value))
    nothing, norm = torch.zeros_like(theta), float(gradient.norm())

    def refused(reason: str) -> TrpoStep:
        return TrpoStep(False, nothing, 0.0, float(value), float(value), 0, reason, norm)

    if not bool(gradient.any()):
        return refused("zero gradient")
    product = damped(fisher_product(policy, samples, weights, theta), damping)
    direction = conjugate_gradient(
        product, gradient, iterations=cg_iterations, tolerance=cg_tolerance
    )
    curvature = float(direction @ product(direction))
    if not curvature > 0.0:
        return refused(f"curvature {curvature:.3g} along the direction is not positive")
    full = edge(delta, curvature) * direction
    for shrinks in range(searches):
        step = shrink**shrinks * full
        kl = float(weighted_kl(policy, samples, weights, theta, theta + step))
        new = float(surrogate(theta + step))
        if kl < delta and new > float(value):
            policy.load(theta + step)
            return TrpoStep(True, step, kl, new, float(value), shrinks, "", norm)
    return refused(f"no improvement inside the trust region in {searches} trials")


def row_weights(samples: ActionBatch, average: str = "token") -> Float[Tensor, "seq tok"]:
    """w_t: 1/N over all valid tokens, or 1/n over the n sequences that have one."""
    average = resolve(average, ("token", "sequence"), what="average")
    counted = samples.mask if average == "token" else samples.mask.any(dim=1)
    return samples.mask.double() / counted.sum().clamp(min=1)


def surrogate_at(
    policy: FlatPolicy,
    samples: ActionBatch,
    advantages: Float[Tensor, "..."],
    weights: Float[Tensor, "seq tok"],
    theta_old: Float[Tensor, " param"],
) -> Callable[[Tensor], Tensor]:
    """θ ↦ Σ w exp(log π_θ - log π_old) A, with π_old fixed at `theta_old`."""
    per_token = advantages if advantages.ndim == 2 else advantages[:, None]
    if len(per_token) != len(weights) or per_token.shape[1] not in (1, weights.shape[1]):
        raise ProxpoError(
            f"trpo: advantages of shape {tuple(advantages.shape)} for samples of shape "
            f"{tuple(weights.shape)}; expected ({len(weights)},) or {tuple(weights.shape)}"
        )
    weighted = (weights * per_token).masked_fill(~samples.mask, 0.0)
    old = policy.logp(theta_old, samples).detach()
    return lambda theta: (weighted * (policy.logp(theta, samples) - old).exp()).sum()


def weighted_kl(
    policy: FlatPolicy,
    samples: ActionBatch,
    weights: Float[Tensor, "seq tok"],
    theta_old: Float[Tensor, " param"],
    theta: Float[Tensor, " param"],
) -> Float[Tensor, ""]:
    """D(θ) = Σ w KL(π_old ‖ π_θ) over the whole vocabulary: a sampled estimate is not convex."""
    old = policy.log_probs(theta_old, samples)
    return (weights * token_kl(old, policy.log_probs(theta, samples))).sum()


def fisher_product(
    policy: FlatPolicy,
    samples: ActionBatch,
    weights: Float[Tensor, "seq tok"],
    theta: Float[Tensor, " param"],
) -> Product:
    """v ↦ F v in Gauss-Newton form, Lᵀ diag(w p) L v with L = ∂ log p/∂θ: one jvp, then one vjp."""

    def log_probs(at: Tensor) -> Tensor:
        return policy.log_probs(at, samples)

    value, pullback = pull(log_probs, theta)
    mass = (weights[..., None] * value.detach().exp()).to(value.dtype)

    def product(v: Tensor) -> Tensor:
        forward = cast(Tensor, jvp(log_probs, (theta,), (v,))[1])
        return pullback(mass * forward)

    return product


def damped(product: Product, damping: float) -> Product:
    """v ↦ F v + λ v."""
    return lambda v: product(v) + damping * v


def conjugate_gradient(
    product: Product,
    rhs: Float[Tensor, " param"],
    *,
    iterations: int = 15,
    tolerance: float = 1e-10,
) -> Float[Tensor, " param"]:
    """x with M x ≈ b, from x = 0, until |b - M x|² ≤ tolerance · |b|² or `iterations` are used up.

    The bound is relative to b (common code has |r|² < 1e-10), so that the step does not depend on
    the scale of the rewards.
    """
    x, residual, direction = torch.zeros_like(rhs), rhs.clone(), rhs.clone()
    squared = residual @ residual
    enough = tolerance * float(squared)
    for _ in range(iterations):
        if float(squared) <= enough:
            break
        image = product(direction)
        alpha = squared / (direction @ image)
        x = x + alpha * direction
        residual = residual - alpha * image
        before, squared = squared, residual @ residual
        direction = residual + squared / before * direction
    return x
