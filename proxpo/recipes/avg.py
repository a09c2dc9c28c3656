from typing import Literal

from proxpo.recipes._registry import Procedure, register


@register(
    "avg",
    paper="arXiv:2411.15370",
    domains=("control",),
    settings={"rollout.max_tokens": 1000, "train.steps": 30},
)
def avg(
    *,
    lr_actor: float = 0.0063,
    lr_critic: float = 0.0087,
    alpha: float = 0.07,
    gamma: float = 0.99,
    beta1: float = 0.0,
    hidden: int = 256,
    normalise_observations: bool = True,
    normalise_features: bool = True,
    scale_td: bool = True,
    width: Literal["covariance", "std"] = "covariance",
    actions: Literal["stretch", "clip"] = "stretch",
) -> Procedure:
    """AVG: a soft actor-critic that learns from each transition once, without replay or target.

        δ = (r + (1-d) γ (Q(s',a') - α log π(a'|s')) - Q(s,a)) / σ,   critic loss δ²
        actor loss α log π(a|s) - Q(s,a), through the action that was executed
        σ² = Var(r - α log π) + Var(γ(1-d)) · mean(G²), running over all steps

    One update after every step of one environment: Adam on the actor, then on the critic, at the
    gradients of the weights before both. Three normalisations can be switched off: of observations
    (running mean and variance), of features (φ/‖φ‖), of TD errors (σ).

    width="covariance": exp(ℓ) is the variance, so std = exp(ℓ/2), as released, although ℓ is named
    a log-std; "std": std = exp(ℓ). As released, G restarts at termination only, not at a time
    limit. Defaults are the paper's for Humanoid; its rates come from a search per task.

    lr_actor, lr_critic: learning rates
    alpha: weight of the entropy
    gamma: discount from step to step
    beta1: Adam's β1 of both optimizers
    hidden: width of the networks
    normalise_observations: scale observations by running moments
    normalise_features: divide the last features by their norm
    scale_td: divide TD errors by σ
    width: exp(ℓ) is the variance ("covariance") or the "std" of an action
    actions: "stretch" actions to the environment's box, or let it "clip" them

    Departures: ‖φ‖ is held above 1e-8. Actions tanh(u) are stretched to the box of the environment;
    actions="clip" leaves them to be clipped there, as released, which is the same for a box of ±1.

    Reference: Vasan et al., arXiv:2411.15370; gauthamvasan/avg.
    """
    ranges = {
        "[0, inf)": ("lr_actor", "lr_critic", "alpha"),
        "[0, 1)": ("beta1",),
        "[0, 1]": ("gamma",),
        "[1, inf)": ("hidden",),
    }
    return Procedure(ranges=ranges)
