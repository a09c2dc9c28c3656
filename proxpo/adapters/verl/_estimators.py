"""verl's advantage estimators from recipes: rewards, filters and advantages of whole groups."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from proxpo.adapters.verl._environment import notify
from proxpo.adapters.verl._recipes import (
    GROUP_KINDS,
    NO_CLOCK,
    PREFIX,
    as_builtins,
    estimator_recipe,
    verl_name,
)
from proxpo.compose import prepare
from proxpo.errors import ProxpoError
from proxpo.ops.masked import last_valid
from proxpo.ops.shapes import Float, Int, Shaped, Tensor
from proxpo.recipes import methods
from proxpo.settings import lengths
from proxpo.stages import STAGES, load_stages
from proxpo.types import Batch, Context, Recipe

CARRIER = "reinforce"  # the recipe around an advantage stage that is named by itself
Make = Callable[[Mapping[str, Any]], Recipe]


def register_estimators() -> None:
    """Registers `algorithm.adv_estimator=proxpo_<slug>`, and `proxpo_<stage>` for single stages."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, make in estimators().items():
        if name not in ADV_ESTIMATOR_REGISTRY:  # verl refuses a second registration
            register_adv_est(name)(estimator(name, make))


def estimators() -> dict[str, Make]:
    """Functions that make the recipe of each estimator from algorithm.options, by verl's name."""
    load_stages()
    named = {verl_name(slug): _of_method(slug) for slug in methods("language")}
    for stage in STAGES["advantage"]:
        named.setdefault(PREFIX + stage, _of_stage(stage))
    return named


def _of_method(slug: str) -> Make:
    return lambda options: estimator_recipe(slug, options)


def _of_stage(stage: str) -> Make:
    return lambda options: estimator_recipe(
        CARRIER, {"advantage": {"name": stage, **as_builtins(options)}}
    )


def estimator(name: str, make: Make) -> Callable[..., tuple[Tensor, Tensor]]:
    """A recipe's advantages with the arguments and results of verl's estimators."""

    def estimate(
        token_level_rewards: Float[Tensor, "seq tok"],
        response_mask: Shaped[Tensor, "seq tok"],
        index: Any = None,
        config: Any = None,
        reward_baselines: Float[Tensor, " seq"] | None = None,
    ) -> tuple[Float[Tensor, "seq tok"], Float[Tensor, "seq tok"]]:
        recipe = make((config.get("options", None) or {}) if config is not None else {})
        check_lengths(name, recipe)
        batch = reward_batch(recipe, token_level_rewards, response_mask.bool(), index)
        ctx = Context(states=recipe.init_state(), clock=NO_CLOCK)
        ready = prepare(recipe.replace(value=None), batch, ctx)
        advantages = ready.batch.advantages
        assert advantages is not None
        for stage in (*recipe.filter, *recipe.prune):
            notify(
                f"{recipe.name}: what {stage.kind}={stage.name} drops gets advantage 0; verl "
                "counts it in its averages, and a KL term still acts on it"
            )
        return advantages, advantages

    estimate.__name__ = estimate.__qualname__ = name
    return estimate


def check_lengths(name: str, recipe: Recipe, tokens: int | None = None) -> None:
    """Refuses an estimator whose longest response is open: verl pads to the longest of a batch.

    tokens: verl's data.max_response_length where it is known
    """
    for place in open_lengths(recipe):
        value = "data.max_response_length" if tokens is None else tokens
        raise ProxpoError(
            f"verl: adv_estimator={name} depends on the longest response allowed, which verl "
            f"does not hand over: set +algorithm.options.{place}={value}"
        )


def open_lengths(recipe: Recipe) -> list[str]:
    """Options of an estimator that stand for the longest response and are not set."""
    known = lengths(recipe).items()
    return [name for name, n in known if n is None and name.split(".")[0] in GROUP_KINDS]


def reward_batch(
    recipe: Recipe,
    token_level_rewards: Float[Tensor, "seq tok"],
    mask: Shaped[Tensor, "seq tok"],
    index: Any,
) -> Batch:
    """Batch of verl's token rewards, their sum per response, and the prompts' numbers.

    Our token rewards come on top of the response's reward at its last token, so a recipe that
    does not ask for step rewards gets what verl's differ from that, and nothing where they do not.
    A reward at a token that is not trained (verl rejected it, or a tool wrote it) counts at the
    trained one before it, as verl's own estimators count all of a response's. Prompts without any
    trained token have no reward: verl's V1 trainer fills up a batch with such rows.
    """
    total = token_level_rewards.sum(dim=1)
    steps = rewards = _at_trained_tokens(token_level_rewards, mask)
    if "token_rewards" not in recipe.needs():
        steps = rewards - torch.where(last_valid(mask), total[:, None], 0.0)
    group = None if index is None else prompt_numbers(index).to(mask.device)
    if group is not None:
        trained = torch.isin(group, group[mask.any(dim=1)])
        total = total.masked_fill(~trained, torch.nan)
    return Batch(
        logp=torch.zeros_like(rewards),
        mask=mask,
        rewards=total,
        token_rewards=steps if bool(steps.any()) else None,
        group=group,
    )


def _at_trained_tokens(
    rewards: Float[Tensor, "seq tok"], mask: Shaped[Tensor, "seq tok"]
) -> Float[Tensor, "seq tok"]:
    """Each reward at the last trained token up to its own, or at the first one; 0 elsewhere."""
    token = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(mask, token, -1).cummax(dim=1).values
    first = mask.int().argmax(dim=1, keepdim=True)
    place = torch.where(before < 0, first, before)
    return torch.where(mask, torch.zeros_like(rewards).scatter_add(1, place, rewards), 0.0)


def prompt_numbers(index: Any) -> Int[Tensor, " seq"]:
    """verl's prompt ids (any objects) as numbers."""
    _, numbers = np.unique(np.asarray([str(prompt) for prompt in index]), return_inverse=True)
    return torch.as_tensor(numbers)


__all__ = ["check_lengths", "estimator", "estimators", "open_lengths", "register_estimators"]
