from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.prompts import informative_prompts
from proxpo.stages.ratio import token
from proxpo.stages.trust import clipped_weight
from proxpo.types import Recipe


@register("cispo", paper="arXiv:2506.13585", confidence="paper formulas")
def cispo(*, trust: Options = options_of(clipped_weight), eps: float = 1e-6) -> Recipe:
    """CISPO: REINFORCE weighted by a truncated ratio without gradient; no token is ever silenced.

        L = (1/N) Σ -sg[clip(r, 1-ε_lo, 1+ε_hi)] · A · log π

    ε_hi is not published; 0.2 (cap 1.2) is verl's. mask_low, mask_high give the unified form
    (eqs 6-7), which with an uncapped weight is PPO's gradient.

    Departures: the paper and verl cap at 1+clip_high, TRL at clip_high itself (absolute=True,
    clip_high=5). verl's default floors the weight at 0.8; the paper has no lower bound
    (clip_low=inf). The paper also takes DAPO's length penalty: `--set reward=overlong_penalty`.

    Reference: MiniMax, arXiv:2506.13585 eqs 4-7.
    """
    return Recipe(
        prompts=(informative_prompts(),),
        advantage=group_relative(eps=eps),
        ratio=token(),
        trust=clipped_weight(**trust),
        aggregate=token_mean(),
    )
