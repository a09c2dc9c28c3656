from proxpo.recipes._registry import register
from proxpo.recipes.grpo import grpo
from proxpo.stages.aggregate import constant_length
from proxpo.stages.filter import not_truncated
from proxpo.types import Recipe


@register("dr-grpo", paper="arXiv:2503.20783")
def dr_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_tokens: float | None = None,
    ignore_truncated: bool = False,
) -> Recipe:
    """Dr. GRPO: GRPO without its two biased normalisers, the response length and the group's std.

        A_i = r_i - mean_g,   L = (1/B) Σ_i Σ_t max(-A r, -A clip(r, 1±ε)) / L_max

    L_max is a constant, the generation budget, never the padded width: max_tokens, or the limit of
    the trainer that runs the method; 3000, the official one, where there is none (`inspect`).
    ignore_truncated=True masks responses without end of sequence; they still count in B.

    Departures: older verl summed over responses instead of averaging. A group of one has A = 0.

    Reference: Liu et al., arXiv:2503.20783, section 3.2.
    """
    base = grpo(clip_low=clip_low, clip_high=clip_high, scale="none", singleton="zero")
    return base.replace(
        filter=(not_truncated(),) if ignore_truncated else (),
        aggregate=constant_length(max_tokens=max_tokens, count_empty=ignore_truncated),
    )
