"""Settings of verl's actor that a method has as options: clip range, dual clip, temperatures.

Where verl's value differs from verl's default, the method's option is set to it, or the setting is
refused. verl's workers cannot tell a value that was written from a default, so a default leaves the
method's own number in force, and one line names the two numbers.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from proxpo.adapters.verl._environment import notify
from proxpo.errors import ProxpoError, fold
from proxpo.settings import make_recipe
from proxpo.types import MANY, Recipe, Stage

# Settings below actor_rollout_ref.actor, and the stage options that are the same number.
STAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "clip_ratio_low": ("trust.clip_low", "ratio.clip_low"),
    "clip_ratio_high": ("trust.clip_high", "ratio.clip_high"),
    "clip_ratio_c": ("trust.dual", "trust.weight_cap"),
    "tau_pos": ("trust.tau_pos",),
    "tau_neg": ("trust.tau_neg",),
    "policy_loss.clip_cov_ratio": ("trust.share",),
    "policy_loss.clip_cov_lb": ("trust.cov_low",),
    "policy_loss.clip_cov_ub": ("trust.cov_high",),
    "policy_loss.kl_cov_ratio": ("regularisers.covariance_penalty.share",),
    "policy_loss.ppo_kl_coef": ("regularisers.covariance_penalty.coef",),
    "policy_loss.dro_beta": (),
}
# Options of methods that set these numbers.
METHOD_OPTIONS: dict[str, tuple[str, ...]] = {
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "clip_ratio_c": ("dual", "weight_cap"),
    "tau_pos": ("tau_pos",),
    "tau_neg": ("tau_neg",),
    "policy_loss.clip_cov_ratio": ("share",),
    "policy_loss.clip_cov_lb": ("cov_low",),
    "policy_loss.clip_cov_ub": ("cov_high",),
    "policy_loss.kl_cov_ratio": ("share",),
    "policy_loss.ppo_kl_coef": ("coef",),
}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
ACTOR = "actor_rollout_ref.actor"


def defaults() -> dict[str, Any]:
    """verl's own values of the settings in STAGE_OPTIONS, and of clip_ratio."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    actor = {entry.name: entry.default for entry in dataclasses.fields(ActorConfig)}
    fields = dataclasses.fields(PolicyLossConfig)
    loss = {f"policy_loss.{entry.name}": entry.default for entry in fields}
    return {name: (actor | loss)[name] for name in (*STAGE_OPTIONS, "clip_ratio")}


@functools.cache
def default_average() -> str:
    """verl's own value of actor.loss_agg_mode."""
    from verl.workers.config import ActorConfig

    fields = {entry.name: entry.default for entry in dataclasses.fields(ActorConfig)}
    return str(fields["loss_agg_mode"])


def setting_values(actor: Any) -> dict[str, Any]:
    """The settings that an actor config has; a clip bound of null is clip_ratio, as in verl."""
    known = defaults()
    read = {name: _read(actor, name) for name in known}
    read = {name: value for name, value in read.items() if value is not _ABSENT}
    whole = read.pop("clip_ratio", known["clip_ratio"])
    bounds = [read.get("clip_ratio_low"), read.get("clip_ratio_high")]
    if whole != known["clip_ratio"] and None not in bounds and set(bounds) != {whole}:
        raise ProxpoError(
            f"verl: {ACTOR}.clip_ratio={whole} has no effect in verl beside clip_ratio_low="
            f"{bounds[0]} and clip_ratio_high={bounds[1]}: set these two instead"
        )
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if name in read and read[name] is None:
            read[name] = whole
    return read


def changed_settings(actor: Any) -> dict[str, Any]:
    """The settings that differ from verl's defaults."""
    known = defaults()
    return {name: value for name, value in setting_values(actor).items() if value != known[name]}


def with_verl_settings(
    slug: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of the method, extended by those that verl's settings stand for.

    Raises ProxpoError for a setting that the method has no place for, or that contradicts its
    options.
    """
    recipe, extended, flat = make_recipe(slug, options), dict(options), _flat(options)
    for name, value in settings.items():
        place = option_of(recipe, name)
        if place is None:
            raise ProxpoError(
                f"verl: {ACTOR}.{name}={value} has no effect on {slug}: trust={recipe.trust.name} "
                f"has no such option; leave it at verl's default, {defaults()[name]}"
            )
        for key in (*METHOD_OPTIONS[name], *STAGE_OPTIONS[name]):
            if flat.get(key, value) != value:
                raise ProxpoError(
                    f"verl: {ACTOR}.{name}={value} contradicts policy_loss.options.{key}="
                    f"{flat[key]}: set one of them"
                )
        extended[place] = value
    return extended


def option_of(recipe: Recipe, name: str) -> str | None:
    """The option of this recipe that verl's setting `name` stands for; None if it has none."""
    return next((place for place in STAGE_OPTIONS[name] if _stage_at(recipe, place)), None)


def option_value(recipe: Recipe, place: str) -> Any:
    """The value of an option written `trust.clip_low` or `regularisers.STAGE.OPTION`."""
    stage = _stage_at(recipe, place)
    return None if stage is None else stage.options[place.split(".")[-1]]


def _stage_at(recipe: Recipe, place: str) -> Stage | None:
    kind, *path = place.split(".")
    stages = getattr(recipe, kind) if kind in MANY else [getattr(recipe, kind)]
    for stage in stages:
        absolute = stage.options.get("absolute")  # bounds of the ratio, not of its distance from 1
        if path[-1] in stage.options and not absolute and path[0] in (stage.name, path[-1]):
            return stage
    return None


def notify_of_differences(recipe: Recipe, actor: Any) -> None:
    """Prints one line if the method's numbers are not those in verl's config."""
    differing: list[str] = []
    for name, value in setting_values(actor).items():
        place = option_of(recipe, name)
        if place is None and name in CLIPS:
            differing.append(f"{name}={value} (the method has none)")
        if place is not None and option_value(recipe, place) != value:
            differing.append(f"{name}={value} ({place} is {option_value(recipe, place)})")
    if differing:
        notify(
            f"{recipe.name} does not read verl's defaults {', '.join(differing)}; "
            "policy_loss.options changes the method's numbers"
        )


_ABSENT: Any = object()


def _read(actor: Any, name: str) -> Any:
    """The value of a nested setting."""
    *above, last = name.split(".")
    for part in above:
        actor = getattr(actor, part, None)
    return getattr(actor, last, _ABSENT)


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """{"trust": {"dual": 3}} as {"trust.dual": 3}."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat |= {f"{fold(key)}.{fold(str(name))}": part for name, part in value.items()}
        else:
            flat[fold(key)] = value
    return flat


__all__ = [
    "ACTOR",
    "STAGE_OPTIONS",
    "changed_settings",
    "default_average",
    "notify_of_differences",
    "option_of",
    "option_value",
    "setting_values",
    "with_verl_settings",
]
