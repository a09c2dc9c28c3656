from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage import gae
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import noise_distance
from proxpo.stages.schedule import transition_buffer
from proxpo.stages.trust import hard_clip
from proxpo.stages.weights import constant
from proxpo.types import Recipe


@register(
    "dpok",
    paper="arXiv:2305.16381",
    domains=("generative models",),
    settings={
        "recipe.clip_low": 2e-3,
        "recipe.clip_high": 2e-3,
        "rollout.samples_per_prompt": 16,
        "train.steps": 150,
        "train.lr": 2e-5,
        "train.grad_clip": 0.1,
    },
)
def dpok(
    *,
    clip_low: float = 1e-4,
    clip_high: float = 1e-4,
    reward_coef: float = 100.0,
    kl_coef: float = 0.01,
    schedule: Options = options_of(transition_buffer),
) -> Recipe:
    """DPOK: policy gradient on denoising steps, held near the pretrained denoiser.

        A = r - V(x_t, t),   ρ = exp(log p(x_{t-1} | x_t) - log p_old)
        L = mean(-w_r · A · clip(ρ, 1±κ)) + w_k · mean((e - e_pre)²)

    A "token" is a step of DDIM with η = 1, log p the mean over dimensions of its Gaussian log
    density, r the reward of the whole sample. The clip has no minimum: outside ±κ a transition has
    no policy gradient, whatever the sign of A. e is the predicted noise. A buffer of the newest
    transitions with their old log p feeds both the fit of V and the policy.

    clip_low, clip_high: clip range below and above 1

    Departures: defaults are those for Stable Diffusion, whose log p is a mean over 16,384
    dimensions. Runs of the models in the box have a clip and a learning rate for 64 dimensions and
    2, train every weight instead of LoRA, sample without guidance, and take 20 steps, not 50.

    Reference: Fan et al., arXiv:2305.16381; google-research/dpok.
    """
    check_numbers("dpok", "[0, inf)", reward_coef=reward_coef)
    return Recipe(
        advantage=gae(gamma=1.0, lam=1.0, whitening=False),
        weights=(constant(factor=reward_coef),),
        ratio=token(),
        trust=hard_clip(clip_low=clip_low, clip_high=clip_high),
        regularisers=(noise_distance(coef=kl_coef),) if kl_coef else (),
        aggregate=token_mean(),
        schedule=transition_buffer(**schedule),
    )
