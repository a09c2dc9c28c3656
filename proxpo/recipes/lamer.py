from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import attempts
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import entropy_bonus
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("lamer", paper="arXiv:2512.16848")
def lamer(
    *,
    advantage: Options = options_of(attempts),
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float | None = 3.0,
    entropy_coef: float = 0.001,
) -> Recipe:
    """LaMer: several attempts at one task as one long episode, with reflections between them.

        G ← r + γ_step G within an attempt, r + γ_traj G at its end; a reflection takes the next G
        A = (E - mean of the group's turns) + (G - mean of the group's turns in the same state)
        L = (1/N) Σ max(-A r, -A clip(r, 1±ε)), held below 3|A| where A < 0, - 0.001 H

    E is the reward of a turn's own attempt. Each turn, played or written between attempts, is a row
    with its own prompt. γ_traj > 0 pays an attempt for what it teaches the next one; the paper has
    0.6 for Minesweeper, WebShop and ALFWorld, 0.9 for Sokoban. γ_traj = 0: attempts stand alone.

    Departures: none known in the loss. The released code hands both γ to its advantage function as
    well, which does not use them; an invalid action lowers E alone, as there.

    Reference: arXiv:2512.16848; mlbio-epfl/LaMer. Clusters by state: GiGPO, arXiv:2505.10978.
    """
    return Recipe(
        advantage=attempts(**advantage),
        ratio=token(),
        trust=ppo_clip(clip_low=clip_low, clip_high=clip_high, dual=dual),
        regularisers=(entropy_bonus(coef=entropy_coef),) if entropy_coef else (),
        aggregate=token_mean(),
    )
