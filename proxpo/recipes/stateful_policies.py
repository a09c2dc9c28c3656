from typing import Literal

from proxpo.recipes._registry import Procedure, register
from proxpo.recipes.ppo import ppo
from proxpo.types import Recipe


@register(
    "stateful-policies",
    paper="arXiv:2311.04082",
    domains=("control",),
    settings={"model.name": "gru", "rollout.max_tokens": 250, "train.lr": 3e-4},
)
def stateful_policies(
    *,
    variant: Literal["ppo", "sac", "reinforce"] = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 0.99,
    lam: float = 0.95,
    entropy_coef: float = 0.0,
    sac_lr: float = 3e-4,
    sac_tau: float = 0.005,
    sac_buffer: int = 50_000,
    sac_batch: int = 128,
    sac_start: int = 1000,
) -> Recipe | Procedure:
    """S2PG: the recurrent state is part of the action, so that no gradient flows through time.

        p(a_t, z_{t+1} | s_t, z_t, a_{t-1}),   ∇J = E Σ_t ∇ log p(a_t, z_{t+1} | s_t, z_t) · Q
        ppo: ρ_t = exp(log p - log p_old), L = -mean min(ρA, clip(ρ, 1±ε)A) - c H, V(s, z, a_prev)
        sac: actor loss mean[α log π_a + α_z log π_z - min Q(s, z, a, z', a_prev)]
        reinforce: Σ_t ∇ log p · (J - b), b = Σ(∇ log p)²J / Σ(∇ log p)² for each weight, else 0

    z_{t+1} is a stored sample: steps can be shuffled, no sequences are needed. Any recipe trains so
    with model.name=gru; model.options.state is the size of z, 0 of which is the method without it.
    The joint ratio is noisier than the action's alone, which is why the paper's ε is small (0.05 to
    0.2). sac has two critics with targets (sac_tau), a replay buffer, and temperatures for a and
    z with the targets -dim(a) and -dim(z). model.options.hidden is the width of actor and critics.

    variant: the learner: "ppo", "sac" or "reinforce"
    sac_lr, sac_tau: learning rate of sac, and the share by which its target critics follow
    sac_buffer, sac_batch, sac_start: transitions kept, of an update, and before the first update

    Departures: the previous action is cleared at the start of an episode, also when sampling (the
    released code keeps the last one there). The paper's settings are 2000 steps, 128 units, a rate
    of 5e-5, batches of 32. Rewriting stored states with fresh ones, off there by default, is not
    offered.

    Reference: Al-Hafez et al., arXiv:2311.04082; robfiras/s2pg.
    """
    if variant != "ppo":
        sac = ("sac_lr", "sac_start", "sac_buffer", "sac_batch", "sac_tau")
        idle = ("clip_low", "clip_high", "lam", "entropy_coef", *(() if variant == "sac" else sac))
        ranges = {"[0, inf)": sac[:2], "[1, inf)": sac[2:4], "[0, 1]": sac[4:]}
        return Procedure(ranges=ranges, idle=idle)
    return ppo(
        clip_low=clip_low,
        clip_high=clip_high,
        gamma=gamma,
        lam=lam,
        value_clip=None,
        entropy_coef=entropy_coef,
    )
