from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import token_mean
from proxpo.stages.ratio import smoothed
from proxpo.stages.trust import unclipped
from proxpo.types import Recipe


@register("pspo", paper="arXiv:2509.21282")
def pspo(*, ratio: Options = options_of(smoothed), eps: float = 1e-6) -> Recipe:
    """PSPO: the ratio of a policy mixed with the old one, and no clip.

        r̃ = (1-α) r + α,   L = (1/N) Σ -A r̃

    The gradient is exactly (1-α) times that of the unclipped surrogate, on every token: under Adam
    and without a second term in the loss, α changes next to nothing. It is no per-token trust
    region. level="sequence" mixes GSPO's ratio.

    Departures: none known; the released script's clipped baseline may have run with an empty clip
    range, so read its headline gap with care. TRL's δ is 1e-4, ours 1e-6.

    Reference: arXiv:2509.21282; MCDwyer/GR-PSPO.
    """
    return Recipe(
        advantage=group_relative(eps=eps),
        ratio=smoothed(**ratio),
        trust=unclipped(),
        aggregate=token_mean(),
    )
