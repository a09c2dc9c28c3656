from typing import Literal

from proxpo.recipes._registry import Options, options_of, register
from proxpo.recipes.grpo import grpo
from proxpo.stages.filter import reject
from proxpo.stages.ratio import token
from proxpo.stages.weights import tis as tis_weights
from proxpo.types import Recipe


@register("tis", paper="Yao et al. 2025", confidence="framework code")
def tis(
    *,
    weights: Options = options_of(
        tis_weights, "mode", "level", "cap", "floor", "normalise", "judge"
    ),
    bypass: bool = False,
    reject_estimator: Literal["k1", "k2", "k3"] = "k1",
    reject_statistic: Literal["token", "seq_sum", "seq_mean", "seq_max"] = "seq_mean",
    reject_threshold: str | float | None = None,
    base: Options = options_of(grpo, "clip_low", "clip_high"),
) -> Recipe:
    """TIS: GRPO times a capped, gradient-free ratio of trainer to sampler probabilities.

        w = min(exp(log π_old - log π_roll), C),   x = w · max(-A r, -A clip(r, 1±ε)),   r = π/π_old

    mode="mask" with floor and cap is IcePop. level: token, sequence or geometric; judge: the level
    held against the bounds, if another. bypass=True takes the ratio to π_roll instead, without w,
    which would count twice. reject_threshold adds a rejection mask (see filter=reject). Any recipe
    can have the weight: `--set weights+=tis`.

    bypass: take the ratio to π_roll, without w
    reject_estimator: measure of the mismatch in the rejection mask: k1, k2 or k3
    reject_statistic: per token, or the response's sum, mean or largest

    Departures: verl C = 2; TRL's default is a sequence mask with cap 3. Masking by weight 0 keeps
    the denominators, a rejection mask shrinks them.

    Reference: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"; IcePop arXiv:2510.18855.
    """
    recipe = grpo(**base)
    if reject_threshold is not None:
        rule = reject(
            estimator=reject_estimator, statistic=reject_statistic, threshold=reject_threshold
        )
        recipe = recipe.replace(filter=(rule,))
    if bypass:
        return recipe.replace(ratio=token(anchor="rollout"))
    return recipe.replace(weights=(tis_weights(**weights),))
