from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.aggregate import token_mean
from proxpo.stages.filter import without_thoughts
from proxpo.stages.prompts import within_reach
from proxpo.stages.ratio import latent
from proxpo.stages.regularisers import latent_kl
from proxpo.types import Recipe


@register("vlpo", paper="arXiv:2511.21395", settings={"rollout.thoughts": 10})
def vlpo(
    *,
    ratio: Options = options_of(latent, "sigma", "noise"),
    kl_coef: float = 0.01,
    easiest: float | None = 0.6,
    ablate_latent: bool = False,
    base: Options = options_of(grpo, "clip_low", "eps", clip_high=0.3, dual=3.0),
) -> Recipe:
    """VLPO (Monet): GRPO in which latent thoughts have ratios too, those of a Gaussian.

        log π(z_t) = -‖z_t - μ_θ(t)‖²/(2σ²),   μ_θ(t) the hidden state that produced z_t
        r = exp(log π - log π_old), exponents within ±10, for tokens and thoughts alike
        L = (1/N) Σ max(-A r, -A clip(r, 1-0.2, 1+0.3)), held below 3|A| where A < 0, + 0.01 k3

    A thought is the last hidden state, fed back as the next input; `rollout.thoughts` of them come
    before every response, and count as tokens in N. noise=0: z = μ_old, as the released code does.
    Then ∂ log π(z)/∂μ = (z - μ)/σ² is 0 at μ = μ_old and r ≤ 1: the first update on a rollout has
    no gradient through its thoughts at all, and later ones pull μ back to z (A > 0) or push it away
    (A < 0). noise=1: z = μ_old + σ ε, a draw from the density, which does have one. σ = 10 is for
    hidden states of thousands of dimensions; a small model needs a smaller one.
    easiest: only prompts solved in a share (0, 0.6] of the responses are trained on; none: all.
    ablate_latent: thoughts are read and not trained on, GRPO with a dual clip.

    Departures: thoughts come before the response, in a number that is set; the released code lets
    the model open and close them with marker tokens. It draws 256 prompts at a time and trains on
    those within reach; this trainer draws until a rollout is full. Its reward (0.9·correct +
    0.1·format) is a task's matter. Thoughts are kept in float32, not float16. With ablate_latent it
    keeps them in the loss, as tokens of their placeholder.

    Reference: arXiv:2511.21395; NOVAglow646/Monet.
    """
    window = None if easiest is None else within_reach(low=1e-6, high=easiest, min_responses=2)
    pull = latent_kl(coef=kl_coef, sigma=ratio["sigma"]) if kl_coef else None
    return grpo(**base).replace(
        prompts=() if window is None else (window,),
        filter=(without_thoughts(),) if ablate_latent else (),
        ratio=latent(**ratio),
        regularisers=() if pull is None else (pull,),
        aggregate=token_mean(),
    )
