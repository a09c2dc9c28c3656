"""Arms of a comparison and their settings: which an arm has, and where in a run's config."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxpo.compare.naming import set_text
from proxpo.compare.plan import Arm
from proxpo.errors import ProxpoError
from proxpo.recipes import method
from proxpo.settings import parse_value
from proxpo.train._settings import place

Settings = dict[str, Any]
# What the plan gives to each run, and where it comes from.
PLANNED = {
    "method": "a method is an arm of its own",
    "seed": "the seeds are those of --seeds and --first-seed",
    "out": "--out names the folder of all runs",
}
Axes = Mapping[str, Sequence[Any]]


def make_arm(name: str | None, slug: str, settings: Mapping[str, Any]) -> Arm:
    """An arm with a name or that of its method and settings; refuses settings it does not have."""
    chosen = method(slug).slug
    values = {key: scalar(value, f"{chosen}: '{key}'") for key, value in settings.items()}
    label = name or " ".join([chosen, *(f"{k}={set_text(v)}" for k, v in values.items())])
    arm = Arm(name=label, method=chosen, settings=values, family=label)
    refuse_same_place(values, arm)
    return arm


def scalar(value: Any, place: str) -> Any:
    """The value that a run reads from its command line: "1" in a study's file is the number 1."""
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ProxpoError(
            f"{place} takes one value, got {value!r}: quote a list that is the value itself, or "
            "give it with --set METHOD:KEY=VALUE; values to choose from are a sweep"
        )
    return parse_value(set_text(value).strip())


def swept_settings(arm: Arm, sweep: Axes) -> list[Settings]:
    """Every combination of the swept values that this arm has settings for."""
    fitting = {key: values for key, values in sweep.items() if fits(key, arm)}
    return combinations(fitting)


def place_of(key: str, arm: Arm) -> list[str]:
    """The path of a setting in the config of the arm's runs; refuses one that it does not have."""
    path = place(key, method(arm.method).defaults)
    if path[0] in PLANNED:
        raise ProxpoError(f"'{key}' cannot be set in a comparison: {PLANNED[path[0]]}")
    return path


def parts_of(key: str) -> list[str]:
    """The settings in a key: two in `clip_low+clip_high`; `weights+` is one, which adds a stage."""
    return [key] if key.endswith("+") else key.split("+")


def refuse_same_place(keys: Iterable[str], arm: Arm) -> None:
    """Refuses two keys for one setting, as lr and train.lr, and those that the arm does not have.

    Keys that add a stage (`weights+`) may share their place.
    """
    taken: dict[str, str] = {}
    for key in keys:
        for part in parts_of(key):
            path = ".".join(place_of(part, arm))
            if taken.setdefault(path, key) != key and not part.endswith("+"):
                raise ProxpoError(f"{arm.name}: {taken[path]} and {key} are one setting")


def fits(key: str, arm: Arm) -> bool:
    """True if the arm has the setting, both of them for `clip_low+clip_high`."""
    try:
        return all(place_of(part, arm) for part in parts_of(key))
    except ProxpoError:
        return False


def places_of(key: str, arms: Iterable[Arm]) -> set[str]:
    """The places of a setting of all in the configs of the arms that have it."""
    return {".".join(place_of(part, a)) for a in arms if fits(key, a) for part in parts_of(key)}


def paths_by_arm(key: str, arms: Iterable[Arm]) -> dict[str, list[str]]:
    """The path of the setting for each arm that has it; an error if none does."""
    paths: dict[str, list[str]] = {}
    errors: list[ProxpoError] = []
    for arm in arms:
        try:
            paths[arm.name], *_ = [place_of(part, arm) for part in parts_of(key)]
        except ProxpoError as error:
            errors.append(error)
    # A setting of the run belongs to all; only a method's own option may be missing elsewhere.
    if (errors and any(path[0] != "recipe" for path in paths.values())) or not paths:
        raise errors[0]
    return paths


def split_settings(settings: Mapping[str, Any]) -> Settings:
    """The settings with each that a key joins on its own."""
    return {part: value for key, value in settings.items() for part in parts_of(key)}


def combinations(axes: Axes) -> list[Settings]:
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


__all__ = [
    "PLANNED",
    "Axes",
    "Settings",
    "combinations",
    "fits",
    "make_arm",
    "parts_of",
    "paths_by_arm",
    "place_of",
    "places_of",
    "scalar",
    "split_settings",
    "swept_settings",
]
