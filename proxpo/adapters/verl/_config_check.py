"""Check of a whole run's settings in verl's driver, before anything is loaded.

A loss mode is half of a method; rewards, filters and advantages are the other half, which verl's
estimator computes in another process. Only the driver, when verl validates its config, sees both.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from proxpo.adapters.verl._environment import notify
from proxpo.adapters.verl._estimators import check_lengths, estimators, open_lengths
from proxpo.adapters.verl._losses import (
    AVERAGES,
    OWN_AVERAGES,
    average_of,
    check_average,
    loss_options,
)
from proxpo.adapters.verl._recipes import (
    GROUP_KINDS,
    PREFIX,
    VERL_ALONE,
    as_builtins,
    known_slug,
    loss_recipe,
    missing_field,
    needed_fields,
    slug_of,
    verl_name,
)
from proxpo.adapters.verl._settings import (
    ACTOR,
    STAGE_OPTIONS,
    changed_settings,
    default_average,
    option_of,
    option_value,
    setting_values,
)
from proxpo.errors import ProxpoError, nearest
from proxpo.settings import at_length, make_recipe
from proxpo.stages.advantage import (
    discounted_return,
    gae,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
)
from proxpo.types import KINDS, Recipe, Stage

Stages = tuple[Stage, ...]
LOSS_CONFIG = "proxpo.adapters.verl.LossConfig"
OWN_SETTINGS = ("options", "batch_every", "batch_folder", "weighted_terms")
# Settings of verl's estimators that proxpo's do not read, with verl's defaults.
UNREAD = {
    "gamma": 1.0,
    "lam": 1.0,
    "norm_adv_by_std_in_grpo": True,
    "use_pf_ppo": False,
    "gdpo_reward_keys": None,
    "gdpo_reward_weights": None,
}


def register_config_check() -> None:
    """Makes verl check proxpo's settings whenever it validates a config."""
    from verl import utils
    from verl.utils import config as module

    if not hasattr(module.validate_config, "__wrapped__"):
        utils.validate_config = module.validate_config = with_check(module.validate_config)


def with_check(validate: Callable[..., None]) -> Callable[..., None]:
    """verl's validation of a config, after proxpo's."""

    @functools.wraps(validate)
    def validate_config(config: Any, *rest: Any, **named: Any) -> None:
        written = command_line_settings()
        complete_config(config, written)
        check_run(config, written)
        validate(config, *rest, **named)

    return validate_config


def command_line_settings() -> set[str]:
    """Names of the settings on the command line of this process: "algorithm.gamma"."""
    from hydra.core.hydra_config import HydraConfig

    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {override.split("=")[0].lstrip("+~") for override in overrides}


def complete_config(config: Any, explicit: Collection[str] = ()) -> None:
    """Writes into the config what verl's workers and estimators cannot find out by themselves.

    That is the longest response allowed, since verl pads to the longest of a batch; and that
    loss_agg_mode was written, where it equals verl's default.
    """
    actor, tokens = config.actor_rollout_ref.actor, config.data.max_response_length
    estimator = str(config.algorithm.adv_estimator)
    if estimator in estimators():
        for place in open_lengths(_recipe_of_estimator(estimator, config.algorithm)):
            _write(config, f"algorithm.options.{place}", tokens)
    slug = slug_of(str(actor.policy_loss.get("loss_mode", "")))
    if slug is None:
        return
    recipe, mode = _loss_recipe(slug, actor), str(actor.loss_agg_mode)
    written = f"{ACTOR}.loss_agg_mode" in explicit and recipe.gradient is None
    if written and average_of(recipe, mode) != AVERAGES.get(mode) and not _aggregate_of(actor):
        if _is_verls(actor.policy_loss):
            _write(config, f"{ACTOR}.policy_loss._target_", LOSS_CONFIG)
        _write(config, f"{ACTOR}.policy_loss.options.aggregate", AVERAGES[mode])
        recipe = _loss_recipe(slug, actor)
    constant = average_of(recipe, mode) == "constant_length"
    if constant and not actor.loss_scale_factor and not recipe.aggregate.options.get("max_tokens"):
        _write(config, f"{ACTOR}.loss_scale_factor", tokens)


def _aggregate_of(actor: Any) -> dict[str, Any]:
    """Options of the loss mode that are written for its average."""
    options = as_builtins(loss_options(actor))
    return {key: x for key, x in options.items() if key.split(".")[0] == "aggregate"}


def _loss_recipe(slug: str, actor: Any) -> Recipe:
    return loss_recipe(slug, as_builtins(loss_options(actor)), changed_settings(actor))


def _write(config: Any, name: str, value: Any) -> None:
    """Sets an option of the run that is open, and prints it."""
    from omegaconf import OmegaConf

    above = OmegaConf.select(config, name.rpartition(".")[0])
    if above is None or OmegaConf.is_dict(above):
        OmegaConf.update(config, name, value, force_add=True)
        notify(f"verl: {name}={value}")


def check_run(config: Any, explicit: Collection[str] = ()) -> None:
    """Raises ProxpoError where a setting would have no effect or half of a method is missing.

    explicit: names of the settings that the user has written, which may equal verl's defaults
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    estimator = str(algorithm.adv_estimator)
    _check_algorithm(algorithm, estimator, explicit)
    slug = known_slug(str(actor.policy_loss.get("loss_mode", "")))
    if slug is not None:
        _check_loss_mode(slug, config, explicit)
    if estimator.startswith(PREFIX):
        recipe = _recipe_of_estimator(estimator, algorithm)
        _check_penalty(estimator, recipe, config)
        check_lengths(estimator, recipe, config.data.max_response_length)


def _check_loss_mode(slug: str, config: Any, explicit: Collection[str]) -> None:
    """Refuses settings that a loss mode does not read, and an estimator of another method."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    _check_target(actor.policy_loss)
    options, recipe = as_builtins(loss_options(actor)), _loss_recipe(slug, actor)
    _check_engine(recipe, config, written=f"{ACTOR}.loss_agg_mode" in explicit)
    _check_explicit(recipe, actor, explicit)
    _check_options(recipe, options, actor)
    _check_estimator(recipe, options, config)
    _check_greedy(recipe, config)
    _check_updates(recipe, config)
    _check_correction(recipe, algorithm)
    if recipe.prompts and not _redraws_prompts(config):
        names = ", ".join(stage.name for stage in recipe.prompts)
        notify(
            f"{slug}: prompts={names} redraws prompts, which verl's V1 trainer does under "
            "algorithm.filter_groups.enable=True; as it is, every prompt of a batch is trained on "
            "(policy_loss.options.prompts=null says so)"
        )


def _check_target(policy_loss: Any) -> None:
    """Refuses settings of our LossConfig under verl's own, which has no place for them."""
    for name in OWN_SETTINGS if _is_verls(policy_loss) else ():
        if name in policy_loss:
            raise ProxpoError(
                f"verl: policy_loss.{name} needs {ACTOR}.policy_loss._target_={LOSS_CONFIG}"
            )


def _is_verls(policy_loss: Any) -> bool:
    """True if the settings of the loss are verl's own class, which has no place for ours."""
    return str(policy_loss.get("_target_", "verl.")).startswith("verl.")


def _check_engine(recipe: Recipe, config: Any, *, written: bool) -> None:
    """Refuses what proxpo's engine would refuse at its first micro-batch.

    written: the user has written actor.loss_agg_mode, which then decides, be it verl's default
    """
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass

    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    computed = {
        "ref_logp": need_reference_policy(config),
        "rollout_logp": rollout.calculate_log_probs,
        "entropy": actor.calculate_entropy or actor.entropy_coeff != 0,
    }
    for name in sorted(needed_fields(recipe)):
        if not computed.get(name, True):
            raise missing_field(recipe, name)
    if recipe.gradient is not None:
        from proxpo.adapters.verl.engine import check_engine_config

        check_average(recipe, actor.loss_agg_mode, written=written)
        check_engine_config(
            recipe, config.actor_rollout_ref.model, omega_conf_to_dataclass(actor).engine
        )


def _redraws_prompts(config: Any) -> bool:
    """True if verl draws new prompts in place of those without information."""
    groups = config.algorithm.get("filter_groups", None)
    return bool(config.trainer.use_v1 and groups and groups.get("enable", False))


def _check_greedy(recipe: Recipe, config: Any) -> None:
    """Refuses verl's `remax` in its V1 trainer, where it fails after the first rollout."""
    if str(config.algorithm.adv_estimator) == "remax" and config.trainer.use_v1:
        raise ProxpoError(
            f"verl: {recipe.name}: algorithm.adv_estimator=remax needs greedy responses, which "
            "verl's V1 trainer does not draw: set trainer.use_v1=False"
        )


def _check_explicit(recipe: Recipe, actor: Any, explicit: Collection[str]) -> None:
    """Refuses a written value that equals verl's default where the method has another number."""
    mode, written = str(actor.loss_agg_mode), _aggregate_of(actor)
    if f"{ACTOR}.loss_agg_mode" in explicit and average_of(recipe, mode) != AVERAGES.get(mode):
        raise ProxpoError(
            f"verl: {ACTOR}.loss_agg_mode={mode} contradicts policy_loss.options."
            f"{', '.join(f'{key}={x}' for key, x in written.items())}: set one of them"
        )
    values = setting_values(actor)
    names = {name: name for name in STAGE_OPTIONS if f"{ACTOR}.{name}" in explicit}
    if f"{ACTOR}.clip_ratio" in explicit:
        values |= {"clip_ratio": actor.clip_ratio}
        names |= {"clip_ratio_low": "clip_ratio", "clip_ratio_high": "clip_ratio"}
    for name, written_name in names.items():
        place, value = option_of(recipe, name), values[written_name]
        own_value = None if place is None else option_value(recipe, place)
        if place is None or own_value != value:
            own = "it has none" if place is None else f"its {place} is {own_value}"
            way = "" if place is None else f"; +{ACTOR}.policy_loss.options.{place}={value} sets it"
            raise ProxpoError(
                f"verl: {ACTOR}.{written_name}={value} is verl's default and does not "
                f"reach {recipe.name}: {own}{way}"
            )


def _check_options(recipe: Recipe, options: Mapping[str, Any], actor: Any) -> None:
    """Refuses options of a loss mode that change nothing but verl's critic or verl's average."""
    for key in options:
        kinds = changed_kinds(recipe.name, options, key)
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
    """True if the average of a method is the one in force."""
    if actor.loss_agg_mode == default_average() and stage.name in OWN_AVERAGES:
        return True
    same = AVERAGES.get(str(actor.loss_agg_mode)) == stage.name
    return same and stage.options.get("max_tokens") in (None, actor.loss_scale_factor)


def changed_kinds(slug: str, options: Mapping[str, Any], key: str) -> set[str]:
    """Kinds of stages that an option changes."""
    rest = {name: value for name, value in options.items() if name != key}
    if any(name.startswith(f"{key.rstrip('+')}.") for name in rest):
        return {key.rstrip("+")}  # a stage whose own options follow
    with_key, without = make_recipe(slug, options), make_recipe(slug, rest)
    return {kind for kind in KINDS if getattr(with_key, kind) != getattr(without, kind)}


def estimator_stages(recipe: Recipe) -> Stages:
    """The stages an estimator runs; a KL in the reward with coefficient 0 adds nothing."""
    stages = [stage for _, stage in recipe.stages() if stage.kind in GROUP_KINDS]
    return tuple(stage for stage in stages if stage.options.get("coef") != 0)


def _check_estimator(recipe: Recipe, options: Mapping[str, Any], config: Any) -> None:
    """Refuses an estimator that does not compute the advantages of the loss mode's method."""
    tokens = config.data.max_response_length
    recipe, default = at_length(recipe, tokens), at_length(make_recipe(recipe.name), tokens)
    if _subtracts_penalty(config):
        recipe, default = _without_penalty(recipe), _without_penalty(default)
    name, wanted = str(config.algorithm.adv_estimator), estimator_stages(recipe)
    alone = [VERL_ALONE.get(stage.name) for stage in wanted] == [name]
    if (alone or name == verl_name(recipe.name)) and wanted == estimator_stages(default):
        return  # algorithm.gamma, lam and options decide over the advantages
    if name.startswith(PREFIX):
        run = estimator_stages(at_length(_recipe_of_estimator(name, config.algorithm), tokens))
    else:
        run = verl_stages(name, config)
    left = {kind for kind in GROUP_KINDS if getattr(default, kind) and not getattr(recipe, kind)}
    run = tuple(stage for stage in run if stage.kind not in left)  # left to verl by an option
    if not wanted or run == wanted or _equivalent(name, wanted, config):
        return
    missing = ", ".join(str(stage) for stage in wanted if stage not in run)
    more = ", ".join(str(stage) for stage in run if stage not in wanted)
    lacks = f"lacks {missing}" if missing else f"adds {more}"
    raise ProxpoError(
        f"verl: {recipe.name}: algorithm.adv_estimator={name} {lacks}; "
        f"{_remedy(recipe, options, tokens)}"
    )


def _remedy(recipe: Recipe, options: Mapping[str, Any], tokens: int) -> str:
    """The settings that give a loss mode its other half, or leave that half to verl."""
    kinds = sorted({stage.kind for stage in estimator_stages(recipe)}, key=KINDS.index)
    leave = ", ".join(f"policy_loss.options.{kind}=null" for kind in kinds)
    advantage = recipe.advantage.name if recipe.advantage is not None else ""
    name = VERL_ALONE.get(advantage, verl_name(recipe.name))
    keys = [key for key in options if changed_kinds(recipe.name, options, key) & set(GROUP_KINDS)]
    with_options = "".join(f" +algorithm.options.{key}={options[key]}" for key in keys)
    for place in open_lengths(make_recipe(recipe.name, options)):
        with_options += f" +algorithm.options.{place}={tokens}"
    if advantage in VERL_ALONE:
        numbers = recipe.advantage.options if recipe.advantage is not None else {}
        known = [key for key in ("gamma", "lam") if key in numbers]
        with_options = "".join(f" algorithm.{key}={numbers[key]}" for key in known)
    return f"set algorithm.adv_estimator={name}{with_options}, or leave that half to verl: {leave}"


def _recipe_of_estimator(name: str, algorithm: Any) -> Recipe:
    """The recipe behind an estimator of proxpo's."""
    known = estimators()
    if name not in known:
        raise ProxpoError(f"verl: unknown algorithm.adv_estimator '{name}'{nearest(name, known)}")
    return known[name](as_builtins(algorithm.get("options", None) or {}))


def verl_stages(name: str, config: Any) -> Stages:
    """The stage that computes what an estimator of verl's own computes; none where none does."""
    algorithm = config.algorithm
    scale: Any = "group" if algorithm.norm_adv_by_std_in_grpo else "none"
    known = {
        "grpo": group_relative(scale=scale),
        "grpo_vectorized": group_relative(),
        "rloo": leave_one_out(singleton="raw"),
        "rloo_vectorized": leave_one_out(),
        "reinforce_plus_plus": discounted_return(
            gamma=algorithm.gamma, baseline="none", whitening=True
        ),
        "opo": length_weighted_baseline(),
        "gae": gae(gamma=algorithm.gamma, lam=algorithm.lam),
    }
    return (known[name],) if name in known else ()


def _equivalent(name: str, wanted: Stages, config: Any) -> bool:
    """True if stages differ only in groups of one, of which there are none, or in ReMax's form."""
    if name == "remax":
        return [stage.options.get("form") for stage in wanted] == ["framework"]
    several = config.actor_rollout_ref.rollout.n > 1
    run = verl_stages(name, config) if not name.startswith(PREFIX) else ()
    return several and list(map(_for_groups, run)) == list(map(_for_groups, wanted))


def _for_groups(stage: Stage) -> tuple[str, dict[str, Any]]:
    """A stage without its rule for groups of one."""
    return stage.name, {k: v for k, v in stage.options.items() if k != "singleton"}


def _check_algorithm(algorithm: Any, name: str, explicit: Collection[str]) -> None:
    """Refuses settings that the chosen estimator does not read."""
    options = as_builtins(algorithm.get("options", None) or {})
    if not name.startswith(PREFIX):
        if options:
            raise ProxpoError(
                f"verl: algorithm.options belong to an adv_estimator proxpo_*, got '{name}'"
            )
        return
    recipe = _recipe_of_estimator(name, algorithm)
    for key, default in UNREAD.items():
        value = algorithm.get(key, default)
        if value == default and f"algorithm.{key}" not in explicit:
            continue
        if value != _recipe_value(recipe, key, default):
            raise ProxpoError(
                f"verl: algorithm.{key}={value} has no effect on adv_estimator={name}, which "
                f"computes {recipe.advantage}: +algorithm.options changes it"
            )
    slug = slug_of(name) or ""
    for key in options if slug else ():
        kinds = changed_kinds(slug, options, key)
        if kinds and not kinds & set(GROUP_KINDS):
            raise ProxpoError(
                f"verl: algorithm.options.{key} has no effect on the advantages of {slug}: it "
                f"belongs to {ACTOR}.policy_loss.options"
            )


def _recipe_value(recipe: Recipe, key: str, default: Any) -> Any:
    """The value of verl's setting `key` that describes the estimator's recipe."""
    options = {} if recipe.advantage is None else recipe.advantage.options
    if key == "norm_adv_by_std_in_grpo":
        return options.get("scale", "none") in ("group", "batch")
    return options.get(key, default)


def _check_penalty(estimator: str, recipe: Recipe, config: Any) -> None:
    """Refuses a penalty for long responses that verl's reward manager has subtracted already."""
    penalised = any(stage.name == "overlong_penalty" for stage in recipe.reward)
    if penalised and _subtracts_penalty(config):
        raise ProxpoError(
            f"verl: adv_estimator={estimator} and reward.reward_kwargs.overlong_buffer_cfg would "
            "both subtract the penalty for long responses: set +algorithm.options.reward=null or "
            "reward.reward_kwargs.overlong_buffer_cfg.enable=False"
        )


def _subtracts_penalty(config: Any) -> bool:
    """True if verl's reward manager subtracts DAPO's penalty for long responses."""
    reward = config.get("reward", None) or {}
    kwargs = reward.get("reward_kwargs", None) or {}
    buffer = kwargs.get("overlong_buffer_cfg", None) or {}
    dapo = (reward.get("reward_manager", None) or {}).get("name", None) == "dapo"
    return bool(dapo and buffer.get("enable", False))


def _without_penalty(recipe: Recipe) -> Recipe:
    rest = [stage for stage in recipe.reward if stage.name != "overlong_penalty"]
    return recipe.replace(reward=tuple(rest))


def _check_correction(recipe: Recipe, algorithm: Any) -> None:
    """Refuses a sampler that is corrected for twice, or not at all in bypass mode.

    There the sampler is the old policy.
    """
    correction = algorithm.get("rollout_correction", None) or {}
    compares = [
        f"{stage.kind}={stage.name}"
        for _, stage in recipe.stages()
        if {"old_logp", "rollout_logp"} <= set(stage.needs)
    ]
    if not correction.get("bypass_mode", False):
        anchored = recipe.ratio is not None and "rollout_logp" in recipe.ratio.needs
        weighs = any({"old_logp", "rollout_logp"} <= set(stage.needs) for stage in recipe.weights)
        corrects = anchored or weighs or "prox_logp" in recipe.needs()
        if corrects and correction.get("rollout_is", None) is not None:
            raise ProxpoError(
                f"verl: {recipe.name} corrects for the sampler itself, and algorithm."
                f"rollout_correction.rollout_is={correction.get('rollout_is')} would do so again: "
                "leave one of them out"
            )
        return
    if compares:
        raise ProxpoError(
            f"verl: {recipe.name} compares the old policy with the sampler's ({compares[0]}), "
            "which are the same under algorithm.rollout_correction.bypass_mode=True: set it False"
        )
    for key in ("rollout_is", "rollout_rs"):
        if correction.get(key, None) is not None:
            raise ProxpoError(
                f"verl: algorithm.rollout_correction.{key}={correction.get(key)} has no effect on "
                f"{recipe.name} under bypass_mode=True, where verl's own loss alone reads it: "
                "leave it out, or set bypass_mode=False"
            )
    if "prox_logp" in recipe.needs():
        raise ProxpoError(
            f"verl: {recipe.name} tells the proximal policy from the sampler's, which are the same "
            "under algorithm.rollout_correction.bypass_mode=True: set it False"
        )


def _check_updates(recipe: Recipe, config: Any) -> None:
    """Refuses more than one update per rollout for a method of one."""
    actor = config.actor_rollout_ref.actor
    epochs, mini, rows = actor.ppo_epochs, actor.ppo_mini_batch_size, config.data.train_batch_size
    if recipe.schedule is not None and (epochs != 1 or mini < rows):
        raise ProxpoError(
            f"verl: {recipe.name} makes one update per rollout, but actor.ppo_epochs={epochs} and "
            f"actor.ppo_mini_batch_size={mini} of data.train_batch_size={rows} make more: set "
            f"ppo_epochs=1 and ppo_mini_batch_size={rows}, or policy_loss.options.schedule=null to "
            "make them all the same"
        )


__all__ = ["check_run", "register_config_check"]
