"""The settings of a whole run, checked in verl's driver before anything is loaded.

A loss mode is half of a method; rewards, filters and advantages are the other half, which verl's
estimator computes in another process. Only the driver, when verl validates its config, sees both.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from proxpo.adapters.verl._estimators import by_name
from proxpo.adapters.verl._host import tell
from proxpo.adapters.verl._losses import AVERAGES, loss_options
from proxpo.adapters.verl._recipes import (
    GROUP_KINDS,
    PREFIX,
    VERL_ALONE,
    known_slug,
    loss_recipe,
    plain,
    slug_of,
    verl_name,
)
from proxpo.adapters.verl._settings import PLACES, WHERE, changed, number_at, place_of, values
from proxpo.errors import ProxpoError, nearest
from proxpo.settings import make_recipe
from proxpo.stages.advantage import gae, group_relative, leave_one_out, length_weighted_baseline
from proxpo.types import KINDS, Recipe, Stage

Half = tuple[Stage, ...]
# Settings of verl's estimators that proxpo's do not read, by verl's default.
UNREAD = {
    "gamma": 1.0,
    "lam": 1.0,
    "norm_adv_by_std_in_grpo": True,
    "use_pf_ppo": False,
    "gdpo_reward_keys": None,
    "gdpo_reward_weights": None,
}


def register() -> None:
    """Check proxpo's settings whenever verl validates a config."""
    from verl import utils
    from verl.utils import config as module

    if not hasattr(module.validate_config, "__wrapped__"):
        utils.validate_config = module.validate_config = checking(module.validate_config)


def checking(validate: Callable[..., None]) -> Callable[..., None]:
    """verl's validation of a config, with ours before it."""

    @functools.wraps(validate)
    def validate_config(config: Any, *rest: Any, **named: Any) -> None:
        check_run(config, written())
        validate(config, *rest, **named)

    return validate_config


def written() -> set[str]:
    """Settings on the command line of this process, by name: "algorithm.gamma"."""
    from hydra.core.hydra_config import HydraConfig

    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {override.split("=")[0].lstrip("+~") for override in given}


def check_run(config: Any, explicit: Collection[str] = ()) -> None:
    """Raises ProxpoError where a setting would have no effect or half of a method is missing.

    explicit: names of the settings that the user has written, which may equal verl's defaults
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    estimator = str(algorithm.adv_estimator)
    _check_algorithm(algorithm, estimator, explicit)
    slug = known_slug(str(actor.policy_loss.get("loss_mode", "")))
    if slug is None:
        return
    options = plain(loss_options(actor))
    recipe = loss_recipe(slug, options, changed(actor))
    _check_written(recipe, actor, explicit)
    _check_options(recipe, options, actor)
    _check_estimator(recipe, options, config)
    _check_updates(recipe, config)
    _check_bypass(recipe, algorithm)
    groups = algorithm.get("filter_groups", None)
    if recipe.prompts and not (groups and groups.get("enable", False)):
        names = ", ".join(stage.name for stage in recipe.prompts)
        tell(
            f"{slug}: prompts={names} redraws prompts, which verl does under "
            "algorithm.filter_groups.enable=True; as it is, every prompt of a batch is trained on "
            "(policy_loss.options.prompts=null says so)"
        )


def _check_written(recipe: Recipe, actor: Any, explicit: Collection[str]) -> None:
    """A value that equals verl's default was written, and the method has another number."""
    known = values(actor)
    written_names = {name: name for name in PLACES if f"{WHERE}.{name}" in explicit}
    if f"{WHERE}.clip_ratio" in explicit:
        known |= {"clip_ratio": actor.clip_ratio}
        written_names |= {"clip_ratio_low": "clip_ratio", "clip_ratio_high": "clip_ratio"}
    for name, written_name in written_names.items():
        place, value = place_of(recipe, name), known[written_name]
        if place is None or number_at(recipe, place) != value:
            own = "it has none" if place is None else f"its {place} is {number_at(recipe, place)}"
            way = "" if place is None else f"; +{WHERE}.policy_loss.options.{place}={value} sets it"
            raise ProxpoError(
                f"verl: {WHERE}.{written_name}={value} is verl's default, which is not told to "
                f"{recipe.name}: {own}{way}"
            )


def _check_options(recipe: Recipe, options: Mapping[str, Any], actor: Any) -> None:
    """Options of a loss mode that change nothing but verl's critic or verl's average."""
    for key in options:
        kinds = touched(recipe.name, options, key)
        if kinds == {"value"}:
            raise ProxpoError(
                f"verl: policy_loss.options.{key} of {recipe.name} changes the value loss, which "
                "verl's critic has to itself: set critic.cliprange_value and critic.optim"
            )
        if kinds == {"aggregate"} and not _averages_alike(recipe.aggregate, actor):
            raise ProxpoError(
                f"verl: policy_loss.options.{key} of {recipe.name} changes the average, which is "
                "verl's: set actor.loss_agg_mode, and actor.loss_scale_factor for a constant length"
            )


def _averages_alike(stage: Stage, actor: Any) -> bool:
    same = AVERAGES.get(str(actor.loss_agg_mode)) == stage.name
    return same and stage.options.get("max_tokens") in (None, actor.loss_scale_factor)


def touched(slug: str, options: Mapping[str, Any], key: str) -> set[str]:
    """Kinds of stages that an option changes."""
    rest = {name: value for name, value in options.items() if name != key}
    if any(name.startswith(f"{key.rstrip('+')}.") for name in rest):
        return {key.rstrip("+")}  # a stage whose own options follow
    whole, bare = make_recipe(slug, options), make_recipe(slug, rest)
    return {kind for kind in KINDS if getattr(whole, kind) != getattr(bare, kind)}


def half(recipe: Recipe) -> Half:
    """The stages an estimator runs; a KL in the reward with coefficient 0 adds nothing."""
    stages = [stage for _, stage in recipe.stages() if stage.kind in GROUP_KINDS]
    return tuple(stage for stage in stages if stage.options.get("coef") != 0)


def _check_estimator(recipe: Recipe, options: Mapping[str, Any], config: Any) -> None:
    """The estimator has to run the rewards, filters and advantages of the loss mode's method."""
    name, wanted = str(config.algorithm.adv_estimator), half(recipe)
    default = make_recipe(recipe.name)
    if name == verl_name(recipe.name) and wanted == half(default):
        return  # algorithm.options decide over the advantages
    ours = name.startswith(PREFIX)
    run = half(_estimator_recipe(name, config.algorithm)) if ours else own_half(name, config)
    left = {kind for kind in GROUP_KINDS if getattr(default, kind) and not getattr(recipe, kind)}
    run = tuple(stage for stage in run if stage.kind not in left)  # left to verl by an option
    if not wanted or run == wanted or _alone(name, wanted, config):
        return
    missing = ", ".join(str(stage) for stage in wanted if stage not in run)
    more = ", ".join(str(stage) for stage in run if stage not in wanted)
    lacks = f"lacks {missing}" if missing else f"adds {more}"
    raise ProxpoError(
        f"verl: {recipe.name}: algorithm.adv_estimator={name} {lacks}; {_remedy(recipe, options)}"
    )


def _remedy(recipe: Recipe, options: Mapping[str, Any]) -> str:
    """The settings that give a loss mode its other half, or give that half up."""
    kinds = sorted({stage.kind for stage in half(recipe)}, key=KINDS.index)
    leave = ", ".join(f"policy_loss.options.{kind}=null" for kind in kinds)
    advantage = recipe.advantage.name if recipe.advantage is not None else ""
    name = VERL_ALONE.get(advantage, verl_name(recipe.name))
    keys = [key for key in options if touched(recipe.name, options, key) & set(GROUP_KINDS)]
    with_options = "".join(f" +algorithm.options.{key}={options[key]}" for key in keys)
    same = "" if name in VERL_ALONE.values() else with_options
    return f"set algorithm.adv_estimator={name}{same}, or leave that half to verl: {leave}"


def _estimator_recipe(name: str, algorithm: Any) -> Recipe:
    """The recipe behind an estimator of ours."""
    known = by_name()
    if name not in known:
        raise ProxpoError(f"verl: unknown algorithm.adv_estimator '{name}'{nearest(name, known)}")
    return known[name](plain(algorithm.get("options", None) or {}))


def own_half(name: str, config: Any) -> Half:
    """The stage that computes what an estimator of verl's own computes; none where none does."""
    algorithm = config.algorithm
    scale: Any = "group" if algorithm.norm_adv_by_std_in_grpo else "none"
    known = {
        "grpo": group_relative(scale=scale),
        "rloo": leave_one_out(singleton="raw"),
        "opo": length_weighted_baseline(),
        "gae": gae(gamma=algorithm.gamma, lam=algorithm.lam),
    }
    return (known[name],) if name in known else ()


def _alone(name: str, wanted: Half, config: Any) -> bool:
    """Differences that do not show: groups of one where there are none, ReMax's other form."""
    if name == "remax":
        return [stage.options.get("form") for stage in wanted] == ["framework"]
    several = config.actor_rollout_ref.rollout.n > 1
    run = own_half(name, config) if not name.startswith(PREFIX) else ()
    return several and [_plural(stage) for stage in run] == [_plural(stage) for stage in wanted]


def _plural(stage: Stage) -> tuple[str, dict[str, Any]]:
    """A stage without its rule for groups of one."""
    return stage.name, {k: v for k, v in stage.options.items() if k != "singleton"}


def _check_algorithm(algorithm: Any, name: str, explicit: Collection[str]) -> None:
    """Settings of the estimators that the chosen one does not read."""
    given = plain(algorithm.get("options", None) or {})
    if not name.startswith(PREFIX):
        if given:
            raise ProxpoError(
                f"verl: algorithm.options belong to an adv_estimator proxpo_*, got '{name}'"
            )
        return
    recipe = _estimator_recipe(name, algorithm)
    for key, default in UNREAD.items():
        value = algorithm.get(key, default)
        if value == default and f"algorithm.{key}" not in explicit:
            continue
        if value != _own(recipe, key, default):
            raise ProxpoError(
                f"verl: algorithm.{key}={value} has no effect on adv_estimator={name}, which "
                f"computes {recipe.advantage}: +algorithm.options changes it"
            )
    slug = slug_of(name) or ""
    for key in given if slug else ():
        kinds = touched(slug, given, key)
        if kinds and not kinds & set(GROUP_KINDS):
            raise ProxpoError(
                f"verl: algorithm.options.{key} has no effect on the advantages of {slug}: it "
                f"belongs to {WHERE}.policy_loss.options"
            )


def _own(recipe: Recipe, key: str, default: Any) -> Any:
    """What the estimator's recipe does where verl has the setting `key`."""
    options = {} if recipe.advantage is None else recipe.advantage.options
    if key == "norm_adv_by_std_in_grpo":
        return options.get("scale", "none") in ("group", "batch")
    return options.get(key, default)


def _check_bypass(recipe: Recipe, algorithm: Any) -> None:
    """verl's bypass mode hands the sampler's numbers over as the old policy, and does no more."""
    correction = algorithm.get("rollout_correction", None) or {}
    if not correction.get("bypass_mode", False):
        return
    for key in ("rollout_is", "rollout_rs"):
        if correction.get(key, None) is not None:
            raise ProxpoError(
                f"verl: algorithm.rollout_correction.{key}={correction.get(key)} has no effect on "
                f"{recipe.name} under bypass_mode=True, where verl's own loss alone reads it"
            )
    if any("prox_logp" in stage.needs for _, stage in recipe.stages()):
        raise ProxpoError(
            f"verl: {recipe.name} tells the proximal policy from the sampler's, which are the same "
            "under algorithm.rollout_correction.bypass_mode=True"
        )


def _check_updates(recipe: Recipe, config: Any) -> None:
    """A method of one update per rollout gets no more than that."""
    actor = config.actor_rollout_ref.actor
    epochs, mini, rows = actor.ppo_epochs, actor.ppo_mini_batch_size, config.data.train_batch_size
    if recipe.schedule is not None and (epochs != 1 or mini < rows):
        raise ProxpoError(
            f"verl: {recipe.name} makes one update per rollout, but actor.ppo_epochs={epochs} and "
            f"actor.ppo_mini_batch_size={mini} of data.train_batch_size={rows} make more"
        )


__all__ = ["check_run", "register"]
