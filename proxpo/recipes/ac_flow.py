from typing import Literal

from proxpo.recipes._registry import Procedure, register


@register(
    "ac-flow",
    paper="arXiv:2510.18072",
    confidence="reconstructed",
    domains=("generative models",),
    settings={"model.name": "flow"},
)
def ac_flow(
    *,
    advantage_of: Literal["difference", "critic", "reward"] = "difference",
    weighting: Literal["exp", "softmax", "positive"] = "exp",
    tau: float = 1.0,
    bound: float | None = 1.0,
    beta: float = 0.1,
    warmup: int = 20,
    samples_per_step: int = 256,
    updates: int = 4,
    actor_lr: float = 3e-4,
    critic_lr: float = 1e-3,
) -> Procedure:
    """AC-Flow: flow matching on own samples, weighted by a critic of intermediate points.

        x_t = (1-t) x_0 + t x_1,  u = x_1 - x_0,   x_1 drawn from the present flow, x_0 noise
        r̃ = clip((r - mean)/(std + 1e-6), ±5),   critic: (V(x_t, t) - r̃)²
        A = r̃ - V(x_t, t), held within ±bound;   w = exp(τA), without gradient
        actor: mean w ‖v(x_t, t) - u‖² + β mean ‖v - v_ref‖²

    The last term bounds the Wasserstein distance to the pretrained flow. In the first `warmup`
    steps the critic alone learns. advantage_of="critic": A = V(x_t, t) less its mean; "reward":
    A = r(x_1), which with bound=none and warmup=0 is ORW-CFM-W2. weighting="softmax": over the
    batch, with mean 1; "positive": w = 1 where A > 0, else 0.

    advantage_of: A: reward less the critic ("difference"), the "critic" alone or the "reward"
    weighting: weight of a sample from A: "exp", "softmax" or "positive"
    tau: τ, the sharpness of the weight
    bound: largest |A|; none: unbounded
    beta: weight of the distance to the pretrained flow
    warmup: steps in which the critic alone learns
    samples_per_step: samples drawn from the flow in a step
    updates: updates of critic and actor in a step
    actor_lr, critic_lr: learning rates

    Departures: reconstructed from the abstract and from ORW-CFM-W2 by the same authors, as no code
    is public: shaping, critic, clip, warm-up, f, τ and β are our choices, and so is x_t on the
    straight line, not on the path of the flow. Each step makes `updates` updates of the critic,
    then of the actor, on all its samples.

    Reference: Fan et al., arXiv:2510.18072 (abstract).
    """
    return Procedure(
        ranges={
            "[2, inf)": ("samples_per_step",),
            "[1, inf)": ("updates",),
            "(0, inf)": ("actor_lr", "critic_lr", "bound"),
            "[0, inf)": ("tau", "beta", "warmup"),
        },
        idle=("tau", "bound") if weighting == "positive" else (),
    )
