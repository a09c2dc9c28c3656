"""MinSR: the natural gradient solved in the n × n space of samples (arXiv:2302.01941).

    J_c = J - mean,  A_c = A - mean,   u = J_cᵀ (J_c J_cᵀ + nλI)⁻¹ A_c      (ascent direction)

Layer by layer, un-centred and with c = nλ this is ISOPO-NTK; whole-model and un-centred it is the
damped natural policy gradient. `minsr_weights` needs the kernel alone: two backward passes, the
first for K, the second with the weights as advantages, give u without storing J.
"""

import torch

from proxpo.errors import ProxpoError
from proxpo.exact.npg import solve_psd
from proxpo.ops.shapes import Float, Tensor


def minsr(
    scores: Float[Tensor, "seq param"],
    advantages: Float[Tensor, " seq"],
    *,
    damping: float,
    centred: bool = True,
    momentum: float = 0.0,
    previous: Float[Tensor, " param"] | None = None,
    projection: float = 0.0,
) -> Float[Tensor, " param"]:
    """u = Jᵀ w; with `momentum` μ and the `previous` update, SPRING's (arXiv:2401.10190):

        u = J_cᵀ (J_c J_cᵀ + nλI)⁻¹ (A_c - μ J_c u₋) + μ u₋

    `projection` adds p·11ᵀ to the kernel, which keeps it regular where centring made it singular.
    """
    if momentum and previous is None:
        raise ProxpoError("minsr: momentum needs `previous`, the update of the last step")
    carried = torch.zeros_like(scores[0]) if previous is None else momentum * previous
    target = advantages - scores @ carried
    weights = minsr_weights(
        scores @ scores.T, target, damping=damping, centred=centred, projection=projection
    )
    return scores.T @ weights + carried


def minsr_weights(
    kernel: Float[Tensor, "seq seq"],
    advantages: Float[Tensor, " seq"],
    *,
    damping: float,
    centred: bool = True,
    projection: float = 0.0,
) -> Float[Tensor, " seq"]:
    """w with u = Jᵀ w, from K = JJᵀ alone: (HKH + nλI)⁻¹ H A, H = I - 11ᵀ/n (I if un-centred).

    Centred weights add up to 0, so that Jᵀ w = J_cᵀ w. λ = 0 takes the pseudo-inverse: the
    shortest u with J_c u = A_c.
    """
    n = len(advantages)
    if centred:
        kernel, advantages = _centre(_centre(kernel).T), _centre(advantages)
    weights = solve_psd(kernel + projection, advantages, damping=damping, times=n)
    return _centre(weights) if centred else weights  # rounding leaves a sum, which Jᵀ w would show


def minsr_damping(kernel: Float[Tensor, "seq seq"], *, rho: float = 1.0) -> float:
    """λ = ρ tr(K) / n², the value at which nλ is ISOPO-NTK's c = ρ tr(K) / n."""
    return rho * float(kernel.trace()) / len(kernel) ** 2


def _centre(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)
