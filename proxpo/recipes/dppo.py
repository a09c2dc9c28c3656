from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.dr_grpo import dr_grpo
from proxpo.stages.trust import divergence_mask
from proxpo.types import Recipe


@register("dppo", paper="arXiv:2602.04879", confidence="framework code")
def dppo(
    *, trust: Options = options_of(divergence_mask), max_tokens: float | None = None
) -> Recipe:
    """DPPO: a trust region on how far a token's probability has moved, not on its ratio.

        L = (1/B) Σ_i Σ_t -M·sg[r]·A·log π / L_max,   A_i = r_i - mean_g
        M = 0 where A > 0, r > 1, D > δ or A < 0, r < 1, D > δ;   D = |π - π_old|, δ = 0.15

    A clip of ratios holds rare tokens, whose ratios are noisy, and lets likely ones move far. D
    does neither. divergence=kl takes the KL of two coins with the two probabilities, δ = 0.05.

    max_tokens: L_max; none: the limit of the trainer that runs the method, 3000 without one

    Departures: D knows the sampled token alone; the paper's top-K form needs the distribution. The
    paper measures from the sampler: `ratio.anchor=rollout`. It has δ = 0.2 of tv in its larger
    runs, there with weight_cap=5; verl's own default is a clip_ratio_c of 3.

    Reference: Qi et al., arXiv:2602.04879 eqs 12-14.
    """
    return dr_grpo(max_tokens=max_tokens).replace(trust=divergence_mask(**trust))
