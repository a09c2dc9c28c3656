from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.dr_grpo import dr_grpo
from proxpo.recipes.grpo import grpo
from proxpo.recipes.reinforce import reinforce
from proxpo.stages.advantage import group_relative
from proxpo.stages.select import curvature_mask
from proxpo.types import Recipe

# Bounds on the shift of the policy and of the objective, as run on each host.
BOUNDS = {"grpo": (1e-4, 0.01), "dr-grpo": (1e-3, 5e-4), "reinforce": (1e-5, 0.1)}


@register("capo", paper="arXiv:2510.00819")
def capo(
    *,
    host: Literal["grpo", "dr-grpo", "reinforce"] = "grpo",
    tau_policy: float | None = None,
    tau_objective: float | None = None,
    select: Options = options_of(curvature_mask, "optimizer", "sides", "k", "learning_rate"),
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_tokens: float | None = None,
    eps: float = 1e-4,
) -> Recipe:
    """CAPO: drop the tokens whose own optimizer step is foreseen to shift too much.

        v = e - π,   G = A v hᵀ,   Δ = G or Adam's step on it,   u = Δ h
        m_H = η A (v·u) + (η²/2) A [(v·u)² - uᵀ(diag π - π πᵀ) u],   m_F = (η²/2) (v·u)²
        keep a token iff m_F < τ_F and |m_H| < τ_H

    A model of the head alone: h the hidden state behind the token, π over its K likeliest tokens, e
    the one drawn. host: GRPO (each response divided by its kept tokens), Dr. GRPO (max_tokens as
    there) or REINFORCE, with the bounds of their runs unless given; a bound of 0 is none.
    sides="one": 0 ≤ m_H < τ_H. η is learning_rate, or by default the trainer's own.

    Departures: hidden states and distributions belong to the same position, where the released code
    is one off. No discount, as in the code.

    Reference: Melo, Abate & Gal, arXiv:2510.00819; luckeciano/stable-pg-llm.
    """
    base = {
        "grpo": lambda: grpo(clip_low=clip_low, clip_high=clip_high, eps=eps),
        "dr-grpo": lambda: dr_grpo(clip_low=clip_low, clip_high=clip_high, max_tokens=max_tokens),
        "reinforce": lambda: reinforce().replace(
            advantage=group_relative(eps=eps, singleton="zero")
        ),
    }[host]()
    policy, objective = BOUNDS[host]
    mask = curvature_mask(
        tau_policy=policy if tau_policy is None else tau_policy,
        tau_objective=objective if tau_objective is None else tau_objective,
        normalise="sequence" if host == "grpo" else "all",
        **select,
    )
    return base.replace(select=(mask,))
