import math
from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.recipes._registry import Procedure, register


@register("rosa", paper="arXiv:2509.23166", confidence="reconstructed", domains=("test time",))
def rosa(
    *,
    beta: float = 1.0,
    damping: float = 1e-4,
    cg_iterations: int = 10,
    cg_tolerance: float = 1e-4,
    turns: int = 5,
    parameters: Literal["lora", "hidden"] = "lora",
    rank: int = 8,
    context: Literal["auto", "dialogue", "prompt"] = "auto",
    greedy: bool = False,
    sgd_lr: float = 0.01,
) -> Procedure:
    """ROSA: after each wrong answer, one linearised step to the KL-regularised optimal policy.

        π* ∝ π exp(r/β):   p*_t(v) = p_t(v) e^{r·1[v=y_t]/β} / Z_t,  Z_t = 1 + p_t(y_t)(e^{r/β}-1)
        min_Δθ Σ_t ‖J_t Δθ - (p*_t - p_t)‖² + λ‖Δθ‖²,   J = ∂p/∂θ:
        (JᵀJ + λI) Δθ = Jᵀ(p* - p) by conjugate gradients from 0,   θ ← θ + Δθ

    p_t is the whole next-token distribution at position t of the answer y that was judged wrong. θ
    is a LoRA adapter (parameters=lora) or an offset of the last hidden state (hidden); it is set
    back before every problem. A conversation has at most `turns` answers and stops at a right one.
    In a dialogue an answer sees all earlier ones, each followed by the line that it is wrong. The
    baseline is θ ← θ + lr · r ∇Σ_t log π(y_t) in the same loop.

    beta: β, the strength of the tie to the present policy
    damping: λ of the least squares
    cg_iterations, cg_tolerance: most steps of conjugate gradients, and the residual that ends them
    turns: answers to a problem at most
    parameters, rank: a "lora" adapter of this rank, or an offset of the last "hidden" state
    context: a "dialogue", the "prompt" alone, or "auto": a dialogue if prompts are chat messages
    greedy: answer greedily in place of sampling
    sgd_lr: learning rate of the baseline with plain gradient steps

    Departures: reconstructed. The source confirms π*, the solve by conjugate gradients with
    Jacobian-vector products, the update on failure alone and both choices of θ; it does not confirm
    the linear system, which is token by token here, nor β, λ, the number of iterations, the LoRA
    rank and the number of turns, which are our choice.

    Reference: arXiv:2509.23166.
    """
    if not beta > 0 or damping < 0 or not 0 <= cg_tolerance < 1:
        raise ProxpoError(
            f"rosa: expected beta > 0, damping >= 0 and cg_tolerance in [0, 1), got {beta}, "
            f"{damping}, {cg_tolerance}"
        )
    if not 0 <= sgd_lr < math.inf:
        raise ProxpoError(f"rosa: sgd_lr is finite and at least 0, got {sgd_lr}")
    if min(cg_iterations, turns, rank) < 1:
        raise ProxpoError(
            f"rosa: cg_iterations, turns and rank are at least 1, got {cg_iterations}, {turns}, "
            f"{rank}"
        )
    if parameters == "hidden" and rank != 8:
        raise ProxpoError("rosa: rank has no effect with parameters=hidden")
    return Procedure()
