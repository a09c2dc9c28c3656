import math
from typing import Literal

from proxpo.recipes._registry import register
from proxpo.stages.advantage import reweighted_baseline
from proxpo.stages.aggregate import seq_mean_token_sum
from proxpo.stages.ratio import sequence, token
from proxpo.stages.schedule import inner_steps
from proxpo.stages.trust import score_function
from proxpo.types import Recipe


@register("rapid", paper="arXiv:2510.03515", confidence="reconstructed")
def rapid(
    *,
    cap: float = 2.0,
    weight_level: Literal["sequence", "token"] = "sequence",
    importance_weighted_baseline: bool = True,
    self_normalised_baseline: bool = False,
    normalise_std: bool = False,
    horizon: int = 4,
) -> Recipe:
    """RAPID: one large rollout, many small steps on it, capped weights in gradient and baseline.

        w_k = sg[min(π(y_k)/π_old(y_k), η)],   V̂ = (1/K) Σ_j w_j R_j,   A_k = R_k - V̂
        L = -(1/B) Σ_k w_k A_k Σ_t log π

    No KL and no PPO clip; η = 2. A rollout feeds `horizon` steps, each on its own share of the
    prompts. Weights and baseline follow the current policy in every update. A group of one teaches
    nothing. Off-policy, equal rewards c leave A = c(1 - mean w): the price of the weighted
    baseline.

    weight_level: weight of the whole "sequence", or of each "token"
    importance_weighted_baseline: weigh the rewards in V̂ (true), or take their plain mean
    self_normalised_baseline: V̂ = Σ w R/Σ w in place of Σ w R/K

    Departures: reconstructed from the abstract and public reviews. That weights are of whole
    responses, that A is not divided by the std, 1/K in V̂ and the horizon are our choices:
    weight_level="token", normalise_std=True, self_normalised_baseline=True (Σ w R/Σ w), or no
    weights in V̂ at all.

    Reference: arXiv:2510.03515 (abstract).
    """
    baseline = "self_normalised" if self_normalised_baseline else "weighted"
    return Recipe(
        advantage=reweighted_baseline(
            cap=cap,
            level=weight_level,
            baseline=baseline if importance_weighted_baseline else "mean",
            normalise_std=normalise_std,
        ),
        ratio=token(limit=math.inf)
        if weight_level == "token"
        else sequence(normalise=False, limit=20.0),
        trust=score_function(cap=cap),
        aggregate=seq_mean_token_sum(),
        schedule=inner_steps(steps=horizon, on="parts"),
    )
