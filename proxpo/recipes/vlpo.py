from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.aggregate import token_mean
from proxpo.stages.prompts import within_reach
from proxpo.stages.ratio import latent
from proxpo.stages.regularisers import latent_kl
from proxpo.types import Recipe


@register("vlpo", paper="arXiv:2511.21395")
def vlpo(
    *,
    ratio: Options = options_of(latent, "sigma", "noise"),
    kl_coef: float = 0.01,
    easiest: float | None = 0.6,
    base: Options = options_of(grpo, "clip_low", "eps", clip_high=0.3, dual=3.0),
) -> Recipe:
    """VLPO (Monet): GRPO in which latent thoughts have ratios too, those of a Gaussian.

        log π(z_t) = -‖z_t - μ_θ(t)‖²/(2σ²),   μ_θ(t) the hidden state that produced z_t
        r = exp(log π - log π_old), exponents within ±10, for tokens and thoughts alike
        L = (1/N) Σ max(-A r, -A clip(r, 1-0.2, 1+0.3)), held below 3|A| where A < 0, + 0.01 k3

    noise=0: thoughts are fed back as they come, z = μ_old, as the released code does; r ≤ 1 then,
    and a fresh batch has no gradient through its thoughts. noise=1: z = μ_old + σ ε. easiest: only
    prompts solved in a share (0, 0.6] of the responses are trained on; none: all.

    Departures: the released code chooses prompts once, by earlier pass rates, and this one in every
    rollout. Its reward (0.9·correct + 0.1·format) is a task's matter. Thoughts are kept in float32.

    Reference: arXiv:2511.21395; NOVAglow646/Monet.
    """
    window = None if easiest is None else within_reach(low=1e-6, high=easiest, min_responses=2)
    pull = latent_kl(coef=kl_coef, sigma=ratio["sigma"]) if kl_coef else None
    return grpo(**base).replace(
        prompts=() if window is None else (window,),
        ratio=latent(**ratio),
        regularisers=() if pull is None else (pull,),
        aggregate=token_mean(),
    )
