from proxpo.recipes._registry import register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import constant_length
from proxpo.stages.filter import not_truncated
from proxpo.stages.ratio import token
from proxpo.stages.trust import ppo_clip
from proxpo.types import Recipe


@register("dr-grpo", paper="arXiv:2503.20783")
def dr_grpo(
    *, clip: float = 0.2, max_tokens: float | None = None, ignore_truncated: bool = False
) -> Recipe:
    """Dr. GRPO: GRPO without its two biased normalisers, the response length and the group's std.

        A_i = r_i - mean_g,   L = (1/B) Σ_i Σ_t max(-A r, -A clip(r, 1±ε)) / L_max

    L_max is a constant, the generation budget, never the padded width: max_tokens, or the limit of
    the trainer that runs the method; 3000, the official one, where there is none (`inspect`).
    ignore_truncated=True masks responses without end of sequence; they still count in B.

    Departures: older verl summed over responses instead of averaging. A group of one has A = 0.

    Reference: Liu et al., arXiv:2503.20783, section 3.2.
    """
    return Recipe(
        advantage=group_relative(scale="none", singleton="zero"),
        filter=(not_truncated(),) if ignore_truncated else (),
        ratio=token(),
        trust=ppo_clip(low=clip, high=clip),
        aggregate=constant_length(max_tokens=max_tokens, count_empty=ignore_truncated),
    )
