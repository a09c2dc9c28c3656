from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import prompt_mean, token_mean
from proxpo.stages.filter import informative, not_truncated
from proxpo.stages.prompts import informative_prompts
from proxpo.stages.ratio import token
from proxpo.stages.reward import overlong_penalty
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("dapo", paper="arXiv:2503.14476")
def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual: float | None = None,
    average: Literal["token", "prompt"] = "token",
    group_filter: Literal["resample", "mask", "off"] = "resample",
    overlong: Literal["penalty", "filter", "both", "off"] = "penalty",
    max_tokens: float | None = None,
    cache: float | None = None,
    penalty_floor: bool = True,
    eps: float = 1e-6,
) -> Recipe:
    """DAPO: GRPO with a higher upper clip, informative prompts, a token mean and a length penalty.

        A_i = (R_i - mean_g)/(std_g + δ), R_i = r_i + soft overlong punishment
        L = (1/N) Σ max(-A r, -A clip(r, 1-0.2, 1+0.28))

    average="prompt" divides by the tokens of each prompt's group, then averages prompts (the
    paper's eq. 8); "token" by all tokens (released code). group_filter: "resample" leaves the
    dropping and redrawing of uninformative prompts to the trainer, "mask" drops them here, "off".
    overlong: "penalty", "filter" (masks truncated responses), "both" or "off". The penalty grows
    over the last `cache` tokens before max_tokens: by default a fifth of the trainer's limit, and
    that limit; 4096 and the paper's 20480 where there is no trainer (`inspect`).

    Departures: the released penalty has no floor at -1 (penalty_floor=False). Their scripts add
    dual=10 and draw three times the prompts at once (prompts.generation_factor=3).

    Reference: Yu et al., arXiv:2503.14476 eqs 8-13.
    """
    penalty = overlong_penalty(max_tokens=max_tokens, cache=cache, floor=penalty_floor)
    masks = (informative(),) if group_filter == "mask" else ()
    return Recipe(
        prompts=(informative_prompts(),) if group_filter == "resample" else (),
        reward=(penalty,) if overlong in ("penalty", "both") else (),
        filter=(*masks, not_truncated()) if overlong in ("filter", "both") else masks,
        advantage=group_relative(eps=eps),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual),
        aggregate=token_mean() if average == "token" else prompt_mean(),
    )
