"""Settings in which runs differ beyond what their arms are compared for.

"A beats B" is a statement about the arms alone, so everything else must be equal: the task, the
model, the data, the budget, the batch and the evaluation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from proxpo.compare.naming import set_text
from proxpo.compare.plan import Arm
from proxpo.report.run_data import Run
from proxpo.report.text import one_line
from proxpo.train._schema import SECTIONS, Config
from proxpo.train._settings import as_dict

Settings = Mapping[str, str]  # values as text, by path
# Settings that differ between the seeds of an arm, or change no number of a run.
FREE = (
    "seed",
    "out",
    "log",
    "checkpoint",
    "task.reward_workers",
    "model.gradient_checkpointing",
    "evaluate.every",  # runs are compared at steps that all were evaluated at
)
SAMPLES = "samples a step"
FILES = "files"  # contents of the local files that a run read, by their paths
ARM = ("method", "recipe")  # settings that arms are compared for in any case
# Settings that no arm may be compared for: they change the score or the budget.
FIXED = ("task", "evaluate", "model.name", "train.steps", SAMPLES, FILES)


def settings_of(run: Run) -> Settings:
    """The settings of a run that can change its numbers, by path; empty where none are known."""
    if not run.config or run.source != "proxpo":
        return {path: _text(value) for path, value in run.config.items()}
    tree = {**_defaults(), **_flat(run.config)}
    tree[SAMPLES] = _product(tree["rollout.prompts_per_step"], tree["rollout.samples_per_prompt"])
    tree |= {f"{FILES}.{one_line(name)}": str(digest)[:12] for name, digest in run.files.items()}
    return {path: _text(value) for path, value in tree.items() if affects_numbers(path)}


def distinct_settings(runs: Iterable[Run]) -> list[Settings]:
    """The known settings of an arm's runs; those of its seeds are one where they are equal."""
    return list({str(known): known for run in runs if (known := settings_of(run))}.values())


def affects_numbers(path: str) -> bool:
    """True for a setting that can change the numbers of a run, its seed apart."""
    return not _within(path, FREE)


def undeclared_differences(
    a: Sequence[Settings], b: Sequence[Settings], declared: Sequence[str]
) -> list[str]:
    """Paths of the settings that forbid a verdict between two arms with these distinct settings.

    A setting that an arm is compared for may differ between the arms, unless it is FIXED, but not
    between the runs of one arm. Of a file, the runs that recorded it are compared.
    """
    both = [*a, *b]
    return [
        path
        for path in dict.fromkeys(path for settings in both for path in settings)
        if (_within(path, (FILES,)) or all(path in settings for settings in both))
        and len(_values(both, path)) > 1
        and (
            not any(_names(key, path) for key in declared)
            or _within(path, FIXED)
            or len(_values(a, path)) > 1
            or len(_values(b, path)) > 1
        )
    ]


def declared_settings(a: Arm, b: Arm, chosen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Settings that two arms are compared for.

    Those of either arm of a plan; those that a sweep chose for both; and those that set runs
    without a plan apart where both arms are named after them.
    """
    keys = [*ARM, *a.settings, *b.settings]
    keys += [key for key in a.varied if key in b.varied]
    tuned = chosen.get(a.name, {}), chosen.get(b.name, {})
    keys += [key for key in tuned[0] if key in tuned[1]]
    return [part for key in keys for part in key.split("+") if part]


def difference_lines(arms: Mapping[str, Sequence[Settings]], paths: Sequence[str]) -> list[str]:
    """A line for each path: `task.name: arithmetic (grpo), gsm8k (p3o)`."""
    lines = []
    for path in paths:
        holders: dict[str, list[str]] = {}
        for name, known in arms.items():
            for value in _values(known, path):
                holders.setdefault(value, []).append(name)
        words = [f"{value} ({', '.join(names)})" for value, names in holders.items()]
        lines.append(f"{path}: {', '.join(words)}")
    return lines


def _values(settings: Sequence[Settings], path: str) -> list[str]:
    return list(dict.fromkeys(each[path] for each in settings if path in each))


def _text(value: Any) -> str:
    """A value as text; 1 and 1.0 are one value."""
    if isinstance(value, (dict, list)):
        return one_line(json.dumps(value, sort_keys=True, default=str))
    return one_line(set_text(value))


def _names(key: str, path: str) -> bool:
    """True where `key` names the setting: `lr` for train.lr, `model` for model.name."""
    return path in (key, f"{key}.name") or path.rsplit(".", 1)[-1] == key


def _within(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _product(a: Any, b: Any) -> Any:
    whole = isinstance(a, int) and isinstance(b, int)
    return a * b if whole else f"{a} x {b}"


@cache
def _defaults() -> Mapping[str, Any]:
    return _flat(as_dict(Config()))


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by path, one level of sections; blocks such as task.options are one value."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if section in SECTIONS and isinstance(values, Mapping):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[section] = values
    return flat


__all__ = [
    "Settings",
    "affects_numbers",
    "declared_settings",
    "difference_lines",
    "distinct_settings",
    "settings_of",
    "undeclared_differences",
]
