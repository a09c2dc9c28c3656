from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_process, group_relative
from proxpo.stages.aggregate import seq_mean_token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.trust import ppo_clip
from proxpo.stages.weights import off_policy_mask
from proxpo.types import Recipe


@register("grpo", paper="arXiv:2402.03300", confidence="framework code")
def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    kl_ratio_corrected: bool = False,
    scale: Literal["group", "batch", "centred", "none"] = "group",
    eps: float = 1e-6,
    singleton: Literal["raw", "zero"] = "raw",
    process: bool = False,
    dual: float | None = None,
    ratio_cap: float | None = None,
    off_policy_threshold: float | None = None,
) -> Recipe:
    """GRPO: PPO's clip with rewards standardised inside the group of responses to one prompt.

        A_i = (r_i - mean_g)/(std_g + δ)
        L = (1/B) Σ_i (1/L_i) Σ_t [ max(-A r, -A clip(r, 1±ε)) + β k3(π, π_ref) ]

    kl_coef=β with kl_ratio_corrected=True is TRL's r·k3. scale: group, batch, centred or none.
    process=True takes step rewards. ratio_cap: min(r, δ) in the unclipped branch (INTELLECT-2).
    off_policy_threshold: DeepSeek-V3.2's mask of stale negative responses.

    Departures: β = 0 as in verl and TRL (the paper has 0.04, R1 0.001). std is unbiased with
    δ = 1e-6 (verl; TRL 1e-4). A group of one keeps its raw reward (verl; singleton="zero" gives 0).
    The average is the paper's; verl defaults to the token mean.

    Reference: Shao et al., arXiv:2402.03300 eqs 3-4.
    """
    kl = (kl_to_ref(coef=kl_coef, ratio_corrected=kl_ratio_corrected),) if kl_coef else ()
    drop = (
        () if off_policy_threshold is None else (off_policy_mask(threshold=off_policy_threshold),)
    )
    outcome = group_relative(scale=scale, eps=eps, singleton=singleton)
    return Recipe(
        advantage=group_process(eps=eps) if process else outcome,
        weights=drop,
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual, cap=ratio_cap),
        regularisers=kl,
        aggregate=seq_mean_token_mean(),
    )
