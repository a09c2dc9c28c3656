from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.aggregate import token_mean
from proxpo.stages.filter import not_truncated
from proxpo.stages.prompts import within_reach
from proxpo.stages.prune import void_turns
from proxpo.stages.reward import usable_only
from proxpo.types import Recipe


@register("simpletir", paper="arXiv:2509.02479")
def simpletir(
    *,
    filter_void: bool = True,
    statistics: Literal["all", "nonvoid"] = "all",
    drop_truncated: bool = False,
    group_filter: Literal["resample", "off"] = "off",
    base: Options = options_of(grpo, "clip_low", "eps", "kl_coef", clip_high=0.28, dual=3.0),
) -> Recipe:
    """SimpleTIR: multi-turn GRPO without the responses that contain a void turn.

        A_i = (r_i - mean_g)/(std_g + δ),   M_it = m_it·[no turn of i is void]
        L = Σ M max(-A r, -A clip(r, 1-0.2, 1+0.28)) / Σ M,   held below 3|A| where A < 0

    A turn is void if it neither holds a complete code block nor an answer
    (`proxpo.stages.prune.is_void`); such turns carry very improbable tokens. Void responses stay in
    the group's statistics (statistics="nonvoid": they do not), those without a token do not;
    drop_truncated also takes out over-long ones. group_filter="resample": the released recipe's
    choice of prompts.

    statistics: rewards in the group's statistics: of "all" responses, or of "nonvoid" ones
    filter_void: leave out responses with a void turn
    drop_truncated: leave out responses that were cut off
    group_filter: "resample" prompts that are too easy or too hard, or "off"

    Departures: the token mean is that of the whole step, the released one of a micro-batch. The
    paper filters responses out; the released code, followed here, zeroes their loss.

    Reference: arXiv:2509.02479; ltzheng/SimpleTIR.
    """
    return grpo(**base).replace(
        prompts=(within_reach(),) if group_filter == "resample" else (),
        reward=(usable_only(truncated=drop_truncated, void=statistics == "nonvoid"),),
        filter=(not_truncated(),) if drop_truncated else (),
        prune=(void_turns(),) if filter_void else (),
        aggregate=token_mean(),
    )
