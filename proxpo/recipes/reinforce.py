from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import discounted_return, group_relative
from proxpo.stages.aggregate import seq_mean_token_sum
from proxpo.stages.ratio import none, sequence, token
from proxpo.stages.trust import score_function, unclipped
from proxpo.types import Recipe


@register("reinforce", paper="Williams 1992", confidence="framework code")
def reinforce(
    *,
    form: Literal["score", "ratio", "truncated"] = "score",
    baseline: Literal["none", "batch", "group", "leave_one_out"] = "group",
    standardise: bool = False,
    gamma: float = 1.0,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> Recipe:
    """REINFORCE: raise the log-probability of sampled tokens in proportion to a baselined return.

        L = (1/B) Σ_i Σ_t -A_it · log π(o_it),   A_it = Σ_{s≥t} γ^{s-t} ρ_is - b

    form="ratio": x = -A·r without any clip, which ISOPO's paper calls REINFORCE; equal gradients at
    r = 1. form="truncated": x = -sg[min(π/π_roll, cap)]·A·log π on data from the sampler, the
    weight per token or per response (level). baseline: none, batch, group or leave_one_out.
    standardise=True takes GRPO's advantages (group mean and std) instead.

    form: "score": no ratio; "ratio": gradient through it; "truncated": ratio as a weight up to
        `cap`
    standardise: divide by the group's std
    cap: largest weight of form="truncated"
    level: ratio of a "token", or of the whole "sequence", in form="truncated"

    Departures: with form="score" the gradient is -A whatever the ratio. Frameworks usually average
    over tokens instead (`--set aggregate=token_mean`). A group of one has advantage 0.

    Reference: R. J. Williams, Machine Learning 8 (1992), eq. 4.
    """
    ratios = {
        "score": none(),
        "ratio": token(),
        "truncated": token(anchor="rollout")
        if level == "token"
        else sequence(anchor="rollout", normalise=False, limit=20.0),
    }
    return Recipe(
        advantage=group_relative(singleton="zero")
        if standardise
        else discounted_return(gamma=gamma, baseline=baseline, singleton="zero"),
        ratio=ratios[form],
        trust={
            "score": score_function(),
            "ratio": unclipped(),
            "truncated": score_function(cap=cap),
        }[form],
        aggregate=seq_mean_token_sum(),
    )
