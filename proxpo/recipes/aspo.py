from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.stages.advantage import group_relative
from proxpo.stages.aggregate import seq_mean_token_mean, token_mean
from proxpo.stages.ratio import token
from proxpo.stages.regularisers import kl_to_ref
from proxpo.stages.trust import asymmetric_clip
from proxpo.types import Recipe


@register("aspo", paper="arXiv:2510.06062")
def aspo(
    *,
    trust: Options = options_of(asymmetric_clip),
    kl_coef: float = 0.001,
    average: Literal["token", "sequence"] = "token",
) -> Recipe:
    """ASPO: the reciprocal ratio weighs tokens of positive advantage, so that rare ones catch up.

        ∂x/∂log π = -A w,   A ≥ 0: w = 0 if r > 1+ε else min(1/r, 3)
                            A < 0: w = 0 if r < 1-ε else min(r, 3)
        L = (1/N) Σ [ x + 0.001·k3(π, π_ref) ]

    ε = 0.2, or 0.4 on tokens above the 80 % quantile of entropy within their response. Beyond the
    cap of 3 the loss is -3A log π: its value jumps there, its gradient does not.

    average: mean over tokens ("token"), or within each "sequence" first

    Departures: average="sequence" is what the released script's micro-batches of one response come
    to. Whether its KL was split by entropy is unknown; here it is on all tokens alike.

    Reference: arXiv:2510.06062; wizard-III/Archer2.0.
    """
    return Recipe(
        advantage=group_relative(),
        ratio=token(),
        trust=asymmetric_clip(**trust),
        regularisers=(kl_to_ref(coef=kl_coef),) if kl_coef else (),
        aggregate=token_mean() if average == "token" else seq_mean_token_mean(),
    )
