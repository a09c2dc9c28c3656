"""The natural policy gradient, exactly: the yardstick for ISOPO, MinSR and TRPO on small models.

    g = E[A ∇ log π(o|q)],   F = E[∇ log π ∇ log πᵀ],   d = F⁻¹ g,   KL(π_θ ‖ π_θ+v) ≈ ½ vᵀ F v

Sequences are summed over tokens and averaged over the batch. F costs P² memory: thousands of
parameters, not millions; `natural_gradient_batch` needs only n × P. Kakade, NeurIPS 2001.
"""

import math

import torch

from proxpo.errors import ProxpoError
from proxpo.exact.policy import ActionBatch, FlatPolicy, token_kl, vocab_scores
from proxpo.ops.shapes import Float, Tensor


def policy_gradient(
    scores: Float[Tensor, "seq param"], advantages: Float[Tensor, " seq"]
) -> Float[Tensor, " param"]:
    """g = Jᵀ A / n."""
    return scores.T @ advantages / len(advantages)


def fisher_exact(policy: FlatPolicy, samples: ActionBatch) -> Float[Tensor, "param param"]:
    """F = (1/n) Σ_i Σ_t Z_tᵀ (diag p_t - p_t p_tᵀ) Z_t: only the contexts are sampled.

    Written as Σ_v p(v) ∇log p(v) ∇log p(v)ᵀ, which is the same matrix and positive semi-definite
    by construction. The sampled actions matter only through the contexts they lead to.
    """
    rows = vocab_scores(policy, samples)
    return rows.T @ rows / len(samples.mask)


def fisher_sequence(scores: Float[Tensor, "seq param"]) -> Float[Tensor, "param param"]:
    """F̂ = JᵀJ / n: unbiased for samples of the policy itself, biased for stale ones."""
    return scores.T @ scores / len(scores)


def fisher_token(
    token_scores: Float[Tensor, "action param"], *, sequences: int
) -> Float[Tensor, "param param"]:
    """Σ of token-score outer products over n: the cross terms it drops vanish in expectation."""
    return token_scores.T @ token_scores / sequences


def natural_gradient(
    fisher: Float[Tensor, "param param"],
    gradient: Float[Tensor, " param"],
    *,
    damping: float = 0.0,
) -> Float[Tensor, " param"]:
    """d = (F + λI)⁻¹ g; the pseudo-inverse when λ = 0, because a softmax has null directions."""
    return solve_psd(fisher, gradient, damping=damping)


def natural_gradient_batch(
    scores: Float[Tensor, "seq param"],
    advantages: Float[Tensor, " seq"],
    *,
    damping: float = 0.0,
) -> Float[Tensor, " param"]:
    """d for F̂ = JᵀJ/n and g = JᵀA/n, by an n × n solve: d = Jᵀ (JJᵀ + nλI)⁻¹ A."""
    n = len(scores)
    return scores.T @ solve_psd(scores @ scores.T, advantages, damping=damping, times=n)


def kl_step(
    direction: Float[Tensor, " param"], gradient: Float[Tensor, " param"], *, delta: float
) -> Float[Tensor, " param"]:
    """√(2δ / g·d) d: the step along d = F⁻¹g whose predicted KL is δ; no step where g·d = 0."""
    slope = float(gradient @ direction)
    if slope <= 0.0:
        return torch.zeros_like(direction)
    return edge(delta, slope) * direction


def edge(delta: float, curvature: float) -> float:
    """√(2δ / dᵀFd): the multiple of a step d whose predicted KL is δ."""
    if not delta >= 0.0:
        raise ProxpoError(f"delta, the KL of a step, must not be negative, got {delta:g}")
    return math.sqrt(2.0 * delta / curvature)


def mean_kl(
    policy: FlatPolicy,
    samples: ActionBatch,
    theta_p: Float[Tensor, " param"],
    theta_q: Float[Tensor, " param"],
) -> Float[Tensor, ""]:
    """(1/n) Σ_i Σ_t KL(π_p(·|s_t) ‖ π_q(·|s_t)) over the whole vocabulary, contexts as sampled."""
    kl = token_kl(policy.log_probs(theta_p, samples), policy.log_probs(theta_q, samples))
    return kl.sum() / len(kl)


def solve_psd(
    matrix: Float[Tensor, "n n"], rhs: Float[Tensor, " n"], *, damping: float, times: int = 1
) -> Float[Tensor, " n"]:
    """(M + times·λI)⁻¹ b in float64: Cholesky where damped, pseudo-inverse for λ = 0."""
    if not damping >= 0.0:
        raise ProxpoError(f"damping must not be negative, got {damping:g}")
    shift = times * damping
    m, b = matrix.double(), rhs.double()
    if shift == 0.0:
        return (torch.linalg.pinv(m, hermitian=True) @ b).to(rhs.dtype)
    factor = torch.linalg.cholesky(m + shift * torch.eye(len(m), dtype=m.dtype, device=m.device))
    return torch.cholesky_solve(b[:, None], factor)[:, 0].to(rhs.dtype)
