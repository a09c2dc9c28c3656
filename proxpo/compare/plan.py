"""The plan of a comparison: what is compared, on which seeds, and every run that follows from it.

A comparison is a folder:

    plan.yaml           this file's Plan: the question, the arms, the seeds, the runs
    base.yaml           what all runs share, a config that `proxpo train` reads
    runs/ID/            an ordinary run directory (config.yaml, metrics.jsonl, summary.json when it
                        is finished, failure.json when it failed), command.txt and log.txt
    report.html ...     drawn from the files above alone

With a sweep every arm is first run with every setting on the tuning seeds (role "tune"); the
setting with the best mean final score goes to the report seeds (role "report"), which no choice
has seen. Without one there is nothing to choose and every run has the role "".
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from proxpo.errors import ProxpoError
from proxpo.files import write_whole
from proxpo.train.config import ConfigDumper, read_yaml

VERSION = 1
PLAN, BASE, RUNS = "plan.yaml", "base.yaml", "runs"
SCORE = "proxpo/eval/accuracy"
REWARD = "proxpo/eval/reward"  # stands in where the reward function does not say what is right


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is compared: a method with its settings.

    `family` is the arm before anything was varied and `varied` the varied values, so that arms of
    one family along one key make a curve ("grpo" at temperature 0.8, 1.0, 1.2).
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    varied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One training run; `settings` are the arm's varied values and this run's swept ones."""

    id: str
    arm: str
    seed: int
    role: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Seeds the settings are chosen on, and those that are reported."""

    report: tuple[int, ...]
    tune: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting that won for an arm, and the mean final score of each on the tuning seeds.

    A setting has no score if one of its runs failed.
    """

    arm: str
    settings: Mapping[str, Any]
    scores: tuple[tuple[Mapping[str, Any], float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the runs; `chosen` and the runs that follow from it come later."""

    title: str
    question: str
    base: Mapping[str, Any]  # a config tree, without method, recipe, seed and out
    arms: tuple[Arm, ...]
    seeds: Seeds
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    score: str = SCORE  # the validation score, by its name in metrics.jsonl; higher is better
    notes: tuple[str, ...] = ()  # what a reader must know, such as unequal tuning effort
    chosen: tuple[Choice, ...] = ()
    runs: tuple[PlannedRun, ...] = ()
    version: int = VERSION

    def arm(self, name: str) -> Arm:
        """The arm called `name`."""
        return next(one for one in self.arms if one.name == name)


def read_plan(folder: str | Path) -> Plan:
    """The plan of a comparison folder; one line if it is missing or damaged."""
    path = Path(folder) / PLAN
    if not path.is_file():
        raise ProxpoError(f"{folder} holds no comparison: {PLAN} is missing")
    tree = read_yaml(path)
    if tree.get("version") != VERSION:
        raise ProxpoError(f"{path}: version {tree.get('version')} is not {VERSION}, read here")
    try:
        return _plan(tree)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ProxpoError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def write_plan(plan: Plan, folder: str | Path) -> None:
    """plan.yaml, and base.yaml for `proxpo train`; each whole or not at all."""
    tree = {"version": plan.version, **asdict(plan)}
    for name, content in ((PLAN, tree), (BASE, plan.base)):
        text = yaml.dump(_plain(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        write_whole(Path(folder) / name, text.encode())


def differences(before: Plan, after: Plan) -> list[str]:
    """What another plan asks for otherwise, a line each; what has come of it does not count."""
    found: list[str] = []
    for one in fields(Plan):
        if one.name not in ("chosen", "runs", "notes", "title", "question"):
            old, new = _plain(getattr(before, one.name)), _plain(getattr(after, one.name))
            found += _changed(one.name, old, new)
    return found


def _changed(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line for key in keys for line in _changed(f"{path}.{key}", old.get(key), new.get(key))
        ]
    return [] if old == new else [f"{path}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(
            str(one["name"]) if isinstance(one, dict) and "name" in one else str(one)
            for one in value
        )
    return str(value)


def _plan(tree: Mapping[str, Any]) -> Plan:
    given = dict(tree)
    given["arms"] = tuple(Arm(**one) for one in tree["arms"])
    given["seeds"] = Seeds(**{role: tuple(map(int, s)) for role, s in tree["seeds"].items()})
    for name in ("sweep", "vary"):
        given[name] = {key: tuple(values) for key, values in tree.get(name, {}).items()}
    given["chosen"] = tuple(
        Choice(
            arm=one["arm"],
            settings=dict(one["settings"]),
            scores=tuple((dict(s), x) for s, x in one["scores"]),
        )
        for one in tree.get("chosen", ())
    )
    given["runs"] = tuple(PlannedRun(**one) for one in tree.get("runs", ()))
    given["notes"] = tuple(tree.get("notes", ()))
    named = {arm.name for arm in given["arms"]}
    for run in given["runs"]:
        if run.arm not in named:
            raise ValueError(f"run {run.id} belongs to '{run.arm}', which is no arm")
    return Plan(**given)


def _plain(value: Any) -> Any:
    """Dicts, lists and scalars alone, as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return _plain(asdict(value))
    return value


class _Dumper(ConfigDumper):
    """Repeats a value that occurs twice instead of pointing to the first."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


__all__ = [
    "BASE",
    "PLAN",
    "REWARD",
    "RUNS",
    "SCORE",
    "Arm",
    "Choice",
    "Plan",
    "PlannedRun",
    "Seeds",
    "differences",
    "read_plan",
    "write_plan",
]
