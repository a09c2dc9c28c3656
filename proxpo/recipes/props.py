from typing import Literal

from proxpo.recipes._registry import Procedure, register


@register("props", paper="arXiv:2311.08290", confidence="official code", domains=("control",))
def props(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 0.99,
    lam: float = 0.95,
    entropy_coef: float = 0.01,
    buffer_batches: int = 2,
    period: int = 16,
    behaviour_lr: float = 1e-3,
    behaviour_clip: float | None = 0.3,
    behaviour_epochs: int = 4,
    behaviour_parts: int = 4,
    kl_coef: float = 0.1,
    kl: Literal["target_behaviour", "behaviour_target"] = "target_behaviour",
    kl_stop: float = 0.03,
) -> Procedure:
    """PROPS: samples with a policy pushed away from actions that the buffer has too often.

        φ ← θ, then minimise mean max(r, clip(r, 1±ε)) + λ KL,  r = π_φ(a|s)/π_θ(a|s), on the buffer
        until mean((r-1) - log r) > δ; the next m steps are drawn from π_φ
        PPO on the last b batches, with log-probabilities under π_θ as the old ones

    The gradient is r where r > 1-ε and 0 below: a sampled action is pushed down until its
    probability is 1-ε of the target's. So the data match π_θ better than draws from it would, and
    the learner needs no importance weights. ROS, the predecessor: period=1, behaviour_epochs=1,
    behaviour_parts=1, behaviour_clip=none, kl_coef=0. behaviour_lr=0 samples on-policy.

    `period` is m and counts steps of all environments together.

    clip_low, clip_high: clip range of the learner's PPO
    gamma: discount from step to step
    lam: GAE's λ
    entropy_coef: weight of the learner's entropy bonus
    buffer_batches: b, the batches that the learner trains on
    period: m, the steps of all environments between two corrections
    behaviour_lr: learning rate of the behaviour policy; 0: on-policy sampling
    behaviour_clip: ε of the behaviour policy; none: no clip
    behaviour_epochs, behaviour_parts: passes over the buffer, and parts of each
    kl_coef: λ, the weight of the KL between behaviour and target
    kl: direction of that KL, "target_behaviour" or "behaviour_target"
    kl_stop: δ, the divergence at which the correction stops

    Departures: the direction of the KL is not confirmed by a source we read; the readable script
    has none, does not restart φ at θ, and its mini-batch is the whole buffer.

    Reference: Corrado & Hanna, arXiv:2311.08290; NicholasCorrado/PROPS.
    """
    counts = ("period", "behaviour_epochs", "behaviour_parts")
    numbers = ("behaviour_clip", "kl_coef", "kl_stop")
    ranges = {
        "(-inf, inf)": ("entropy_coef",),
        "[1, inf)": (*counts, "buffer_batches"),
        "[0, inf)": (*numbers, "behaviour_lr", "clip_low", "clip_high"),
        "[0, 1]": ("gamma", "lam"),
    }
    idle = (*counts, *numbers, "kl") if not behaviour_lr else () if kl_coef else ("kl",)
    return Procedure(ranges=ranges, idle=idle)
