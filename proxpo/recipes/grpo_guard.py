from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.filter import noisy_steps
from proxpo.stages.ratio import gaussian, recentred, token
from proxpo.stages.regularisers import gaussian_kl, kl_to_ref
from proxpo.stages.trust import ppo_clip
from proxpo.stages.weights import inverse_step
from proxpo.types import Recipe


@register(
    "grpo-guard",
    paper="arXiv:2510.22319",
    confidence="framework code",
    domains=("language", "generative models"),
)
def grpo_guard(
    *,
    policy: Literal["gaussian", "tokens"] = "gaussian",
    normalise: bool = True,
    reweight: bool = True,
    weights: Options = options_of(inverse_step),
    clip_low: float | None = None,
    clip_high: float | None = None,
    advantage_bound: float = 5.0,
    kl_coef: float = 0.0,
) -> Recipe:
    """GRPO-Guard: log-ratios of denoising steps recentred and rescaled, losses divided by Δt.

        r̂ = exp(s (ℓ + b)),   b = mean_D(Δμ²)/(2s²),   s (ℓ + b) = mean_D(Δμ·ε)
        L = (1/N) Σ δ_t · max(-A r̂, -A clip(r̂, 1±ε)),   δ_t = 1/Δt

    For Gaussian policies of a flow or diffusion sampler: a row is a sample, a "token" a denoising
    step, logp the mean log-density over D dimensions, s the step's standard deviation. normalise
    and reweight switch its two parts. noise_schedule="dance": δ_t = (1 + η²(1-t)/(2t))/Δt. kl_coef
    adds mean_D((μ - μ_ref)²)/(2s²). policy="tokens", ours: log r + KL(π_old‖π) over the vocabulary.

    Departures: the official clip range is unknown: 1e-4, as one re-implementation has it, and 0.2
    for tokens. advantage_bound and η are our choices. Steps without noise are left out.

    Reference: arXiv:2510.22319; Flow-Factory and TeleBoost.
    """
    steps = policy == "gaussian"
    usual = 1e-4 if steps else 0.2
    centred, anchor = (gaussian(), gaussian_kl) if steps else (recentred(), kl_to_ref)
    return Recipe(
        filter=(noisy_steps(),) if steps else (),
        advantage=group_relative(bound=advantage_bound),
        weights=(inverse_step(**weights),) if reweight and steps else (),
        ratio=centred if normalise else token(),
        trust=ppo_clip(
            clip_low=usual if clip_low is None else clip_low,
            clip_high=usual if clip_high is None else clip_high,
        ),
        regularisers=(anchor(coef=kl_coef),) if kl_coef else (),
        aggregate=token_mean(),
    )
