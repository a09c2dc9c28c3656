"""A comparison as a command line or a study describes it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxpo.compare.arms import Axes, Settings, make_arm, places_of, swept_settings
from proxpo.compare.plan import SCORE
from proxpo.errors import ProxpoError, fold, resolve
from proxpo.recipes import methods
from proxpo.settings import TASK_OPTIONS, parse_setting, parse_value
from proxpo.train.config import task_name


@dataclass(frozen=True, kw_only=True)
class Request:
    """A comparison as a command line or a study describes it.

    arms: (name or none, method, settings); base: settings of all runs, or of one method where the
    key reads METHOD:KEY; seeds: how many are reported, from first_seed on; tune: how many the sweep
    is judged on; tune_best: how many settings of an arm go on after the first of these, None for
    all; notes: what a reader must know.
    """

    arms: Sequence[tuple[str | None, str, Mapping[str, Any]]]
    seeds: int = 3
    first_seed: int = 0
    tune: int = 2
    tune_best: int | None = None
    config: str | None = None
    base: Sequence[tuple[str, Any]] = ()
    sweep: Axes = field(default_factory=dict)
    vary: Axes = field(default_factory=dict)
    title: str = ""
    question: str = ""
    score: str = SCORE
    notes: Sequence[str] = ()


def with_arms(request: Request, names: Sequence[str], *, of: str) -> Request:
    """The comparison with the arms of these names alone, in its own order, then further methods."""
    named = {make_arm(*arm).name: arm for arm in request.arms}
    wanted = {known for known in named if fold(known) in map(fold, names)}
    further = []
    for name in names:
        if fold(name) in map(fold, wanted):
            continue
        arm = parse_arm(name)
        if fold(arm[1]) not in map(fold, methods()):
            resolve(name, [*named, *methods()], what=f"arm of {of}")
        further.append(arm)
    notes = [f"{make_arm(*arm).name} is no arm of {of} and has its settings" for arm in further]
    return replace(
        request,
        arms=[*(arm for name, arm in named.items() if name in wanted), *further],
        notes=(*request.notes, *notes),
    )


def foreign_options(base: Sequence[tuple[str, Any]], later: Sequence[tuple[str, Any]]) -> list[str]:
    """Options of the task of `base`, where settings that come later name another task."""
    if task_name(base) == task_name([*base, *later]):
        return []
    return [key for key, _ in base if key.startswith(TASK_OPTIONS)]


def overridden(
    request: Request, *, base: Sequence[tuple[str, Any]], sweep: Axes, vary: Axes
) -> Request:
    """The comparison with these settings of all runs and these axes in place of its own.

    Its own options of a task are left out where the settings name another one.
    """
    arms = [make_arm(*arm) for arm in request.arms]
    given = set().union(*(places_of(key, arms) for key, _ in base))
    free = set().union(*(places_of(key, arms) for key in (*sweep, *vary)))
    left = foreign_options(request.base, base)
    ended = [key for key in (*request.sweep, *request.vary) if given & places_of(key, arms)]
    names = ", ".join(key.removeprefix(TASK_OPTIONS) for key in left)
    task = task_name(request.base)
    notes = [f"options of task {task} are left out: {names}"] if left else []
    notes += [f"{key} is set, and neither swept nor varied" for key in ended]
    kept = [
        (key, value)
        for key, value in request.base
        if key not in left and not free & places_of(key, arms)
    ]
    return replace(
        request,
        base=(*kept, *base),
        sweep={**{key: request.sweep[key] for key in request.sweep if key not in ended}, **sweep},
        vary={**{key: request.vary[key] for key in request.vary if key not in ended}, **vary},
        notes=(*request.notes, *notes),
    )


def tune_best_decides(request: Request) -> bool:
    """True if `tune_best` ends the tuning of some settings after the first tuning seed."""
    if request.tune_best is None or not request.sweep or request.tune < 2:
        return False
    tried = [len(swept_settings(make_arm(*arm), request.sweep)) for arm in request.arms]
    return 2 <= request.tune_best < max(tried)


def parse_arm(text: str) -> tuple[None, str, Settings]:
    """An arm from `grpo:clip_low=0.4,clip_high=0.4`; a comma only separates before a KEY=."""
    name, colon, rest = text.partition(":")
    settings: Settings = {}
    if colon and not rest:
        raise ProxpoError(f"'{text}': expected METHOD:KEY=VALUE")
    for part in re.split(r",(?=[^,=]+=)", rest) if rest else []:
        key, value = parse_setting(part)
        if key in settings:
            raise ProxpoError(f"'{text}' sets {key} twice")
        settings[key] = value
    return None, name, settings


def parse_axis(text: str, *, option: str) -> tuple[str, tuple[Any, ...]]:
    """`lr=1e-5,3e-5` as a key and its values."""
    key, equals, values = text.partition("=")
    parsed = tuple(parse_value(text.strip()) for text in values.split(",") if text.strip())
    if not key.strip() or not equals or not parsed:
        raise ProxpoError(f"{option} takes KEY=VALUE,VALUE..., got '{text}'")
    return key.strip(), parsed


def parse_axes(texts: Iterable[str], *, option: str) -> dict[str, tuple[Any, ...]]:
    """The axes of an option that may be repeated, each key once."""
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, values = parse_axis(text, option=option)
        if key in axes:
            raise ProxpoError(f"{option} {key} is given twice: write all its values in one")
        axes[key] = values
    return axes


__all__ = [
    "Request",
    "foreign_options",
    "overridden",
    "parse_arm",
    "parse_axes",
    "parse_axis",
    "tune_best_decides",
    "with_arms",
]
