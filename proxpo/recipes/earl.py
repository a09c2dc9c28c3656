from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.aggregate import token_mean
from proxpo.stages.weights import entropy_gate, top_entropy
from proxpo.types import Recipe


@register("earl", paper="arXiv:2511.12033", confidence="reconstructed")
def earl(
    *,
    share: float = 0.2,
    level: Literal["response", "batch"] = "response",
    normalise: Literal["all", "gated"] = "all",
    base: Options = options_of(grpo, "clip_low", "clip_high", "kl_coef", "eps"),
) -> Recipe:
    """EARL: GRPO's gradient only on the tokens of highest entropy within each response.

        τ_i = (1 - ρ)-quantile of the response's entropies,   m_it = 1[H_it ≥ τ_i]
        L = (1/N) Σ m·max(-A r, -A clip(r, 1±ε)) + β (1/N) Σ k3(π, π_ref)

    N counts all valid tokens, or the gated ones (normalise="gated"). The gate is found once per
    rollout. level="batch" is the choice of entropy-80-20: one quantile for all tokens of the
    optimizer step, from current entropies.

    level: highest entropies of each "response", or of the "batch"

    Departures: reconstructed from the abstract and one summary. ρ = 0.2, the divisor, entropies of
    the old policy, KL on all tokens and β = 0 are our choices. Its rewards, a cascade of checks of
    Verilog code, are the user's.

    Reference: arXiv:2511.12033.
    """
    if level == "response":
        gate = entropy_gate(share=share, normalise=normalise)
    else:
        divisor = "all" if normalise == "all" else "selected"
        gate = top_entropy(share=share, normalise=divisor, rule="quantile")
    return grpo(**base).replace(weights=(gate,), aggregate=token_mean())
