"""Advantage estimators: rewards, filters and advantages of a recipe, where groups are whole."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from proxpo.adapters.verl._host import tell
from proxpo.adapters.verl._recipes import NO_CLOCK, PREFIX, group_recipe, plain, verl_name
from proxpo.compose import prepare
from proxpo.ops.masked import last_valid
from proxpo.ops.shapes import Float, Int, Shaped, Tensor
from proxpo.recipes import methods
from proxpo.settings import at_length
from proxpo.stages import STAGES, load_stages
from proxpo.types import Batch, Context, Recipe

CARRIER = "reinforce"  # the recipe that carries an advantage stage asked for by its own name


def register() -> None:
    """`algorithm.adv_estimator=proxpo_<slug>`, and `proxpo_<stage>` for a stage by itself."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, find in by_name().items():
        if name not in ADV_ESTIMATOR_REGISTRY:  # verl refuses a second registration
            register_adv_est(name)(estimator(name, find))


def by_name() -> dict[str, Callable[[Mapping[str, Any]], Recipe]]:
    """Every estimator's recipe, made from algorithm.options."""
    load_stages()
    chosen = {verl_name(slug): _of_method(slug) for slug in methods()}
    for stage in STAGES["advantage"]:
        chosen.setdefault(PREFIX + stage, _of_stage(stage))
    return chosen


def _of_method(slug: str) -> Callable[[Mapping[str, Any]], Recipe]:
    return lambda options: group_recipe(slug, options)


def _of_stage(stage: str) -> Callable[[Mapping[str, Any]], Recipe]:
    return lambda options: group_recipe(CARRIER, {"advantage": {"name": stage, **plain(options)}})


def estimator(
    name: str, find: Callable[[Mapping[str, Any]], Recipe]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A recipe's advantages with the arguments and results of verl's estimators."""

    def estimate(
        token_level_rewards: Float[Tensor, "seq tok"],
        response_mask: Shaped[Tensor, "seq tok"],
        index: Any = None,
        config: Any = None,
        reward_baselines: Float[Tensor, " seq"] | None = None,
    ) -> tuple[Float[Tensor, "seq tok"], Float[Tensor, "seq tok"]]:
        recipe = find((config.get("options", None) or {}) if config is not None else {})
        recipe = at_length(recipe, response_mask.shape[1])  # verl pads to its response length
        batch = make_batch(recipe, token_level_rewards, response_mask.bool(), index)
        ready = prepare(recipe.replace(value=None), batch, Context(clock=NO_CLOCK))
        advantages = ready.batch.advantages
        assert advantages is not None
        if recipe.filter:
            dropped = ", ".join(stage.name for stage in recipe.filter)
            tell(f"{recipe.name}: what filter={dropped} drops gets advantage 0; verl counts it")
        return advantages, advantages

    estimate.__name__ = estimate.__qualname__ = name
    return estimate


def make_batch(
    recipe: Recipe,
    token_level_rewards: Float[Tensor, "seq tok"],
    mask: Shaped[Tensor, "seq tok"],
    index: Any,
) -> Batch:
    """A batch of rewards: verl's token rewards, their sum per response, the prompts' numbers.

    Our token rewards come on top of the response's reward at its last token, so a recipe that
    does not ask for step rewards gets what verl's differ from that, and nothing where they do not.
    """
    rewards = torch.where(mask, token_level_rewards, 0.0)
    total, steps = rewards.sum(dim=1), rewards
    if not any("token_rewards" in stage.needs for _, stage in recipe.stages()):
        steps = rewards - torch.where(last_valid(mask), total[:, None], 0.0)
    return Batch(
        logp=torch.zeros_like(rewards),
        mask=mask,
        rewards=total,
        token_rewards=steps if bool(steps.any()) else None,
        group=None if index is None else numbered(index).to(mask.device),
    )


def numbered(index: Any) -> Int[Tensor, " seq"]:
    """verl's prompt ids (any objects) as numbers."""
    _, numbers = np.unique(np.asarray([str(one) for one in index]), return_inverse=True)
    return torch.as_tensor(numbers)


__all__ = ["by_name", "estimator", "register"]
