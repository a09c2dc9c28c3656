"""The plan of a comparison: arms, seeds, and every run that follows from them.

A comparison is a folder:

    plan.yaml           this file's Plan: the question, the arms, the seeds, the runs
    base.yaml           settings of all runs, a config that `proxpo train` reads
    runs/ID/            an ordinary run directory (config.yaml, metrics.jsonl, summary.json when it
                        is finished, failure.json when it failed), command.txt and log.txt
    report.html ...     drawn from the files above alone

With a sweep every arm is first run with every setting on the tuning seeds (role "tune"), or after
the first of them with its best settings alone (`tune_best`); the setting with the best mean final
score goes to the report seeds (role "report"), which no choice has seen. Without a sweep there is
nothing to choose and every run has the role "".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.files import write_whole
from proxpo.runs.yaml_file import dump_yaml, read_yaml

VERSION = 1
PLAN, BASE, RUNS = "plan.yaml", "base.yaml", "runs"
RESULTS = "summary.json"  # of the report
SEARCH = "search.yaml"  # in the folder of a search, which holds comparisons
SCORE = "proxpo/eval/accuracy"
_SCORE = (int, float, type(None))
REWARD = "proxpo/eval/reward"  # the score of a task without an accuracy


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with its settings, to be compared with other arms.

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
    """Seeds on which settings are chosen, and those that are reported."""

    report: tuple[int, ...]
    tune: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()  # by the comparisons that this one confirms


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting that won for an arm, and the mean final score of each on the tuning seeds.

    A setting has no score if one of its runs failed. Settings that did not go on after the first
    tuning seed have the score of that one.
    """

    arm: str
    settings: Mapping[str, Any]
    scores: tuple[tuple[Mapping[str, Any], float | None], ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A difference that a comparison has shown: winner minus loser, with its 95 % interval."""

    winner: str
    loser: str
    measure: str  # "final" | "area"
    mean: float
    low: float
    high: float
    p_holm: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides the runs; `chosen` and the runs that follow from it come later."""

    title: str
    question: str
    base: Mapping[str, Any]  # a config tree, without method, recipe, seed and out
    arms: tuple[Arm, ...]
    seeds: Seeds
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tune_best: int | None = None  # settings of an arm that go on after the first tuning seed
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    score: str = SCORE  # the validation score, by its name in metrics.jsonl; higher is better
    notes: tuple[str, ...] = ()  # what a reader must know, such as unequal tuning effort
    confirms: tuple[Finding, ...] = ()  # of an earlier comparison of these arms
    chosen: tuple[Choice, ...] = ()
    runs: tuple[PlannedRun, ...] = ()
    version: int = VERSION

    def arm(self, name: str) -> Arm:
        """The arm called `name`."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def runs_to_come(self) -> int:
        """Runs that follow from choices still to be made, unless all of an arm's tuning fails."""
        if not self.sweep:
            return 0
        chosen = {choice.arm for choice in self.chosen}
        chosen |= {run.arm for run in self.runs if run.role == "report"}  # before arms were added
        first, others = self.seeds.tune[:1], self.seeds.tune[1:]
        tuned_on = chosen | {run.arm for run in self.runs if run.seed in others}
        tried = Counter(run.arm for run in self.runs if run.seed in first)
        number = len(self.seeds.report) * sum(arm.name not in chosen for arm in self.arms)
        if self.tune_best is not None:
            waiting = [arm.name for arm in self.arms if arm.name not in tuned_on]
            number += len(others) * sum(min(self.tune_best, tried[name]) for name in waiting)
        return number


def read_plan(folder: str | Path) -> Plan:
    """The plan of a comparison's folder; refused in one line if it is missing or damaged."""
    path = Path(folder) / PLAN
    if not path.is_file():
        raise ProxpoError(f"{folder} holds no comparison: {PLAN} is missing")
    tree = read_yaml(path)
    if tree.get("version") != VERSION:
        raise ProxpoError(f"{path}: version {tree.get('version')} is not {VERSION}, read here")
    try:
        return check_runs(_plan(tree))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ProxpoError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def check_runs(plan: Plan) -> Plan:
    """The plan, if no two of its runs share an id or a folder; refused in one line otherwise."""
    for name in ("id", "folder"):
        first: dict[str, PlannedRun] = {}
        for run in plan.runs:
            value = str(PurePath(getattr(run, name))).lower()  # case is no difference on every disk
            if value in first:
                raise ProxpoError(
                    f"'{first[value].arm}' and '{run.arm}', seed {run.seed}, share the {name} "
                    f"{getattr(run, name)}: one has overwritten the other, make the comparison "
                    "again in another folder"
                )
            first[value] = run
    return plan


def write_plan(plan: Plan, folder: str | Path) -> None:
    """Writes plan.yaml, and base.yaml for `proxpo train`, each whole or not at all."""
    tree = {"version": plan.version, **asdict(plan)}
    for name, content in ((PLAN, tree), (BASE, plan.base)):
        write_whole(Path(folder) / name, dump_yaml(plain(content)).encode())


def plan_differences(before: Plan, after: Plan) -> list[str]:
    """The settings in which two plans differ, a line each; choices and runs made do not count."""
    lines: list[str] = []
    for field_ in fields(Plan):
        if field_.name not in ("chosen", "runs", "notes", "confirms", "title", "question"):
            old, new = plain(getattr(before, field_.name)), plain(getattr(after, field_.name))
            lines += _changed(field_.name, old, new)
    return lines


def _changed(path: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line for key in keys for line in _changed(f"{path}.{key}", old.get(key), new.get(key))
        ]
    same = repr(old) == repr(new)  # 1 == True, but they are two settings
    return [] if same else [f"{path}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(
            str(item["name"]) if isinstance(item, dict) and "name" in item else str(item)
            for item in value
        )
    return str(value)


def _plan(tree: Mapping[str, Any]) -> Plan:
    values = dict(tree)
    values["arms"] = tuple(_made(Arm, arm, "arms") for arm in _list(tree, "arms"))
    seeds = _mapping(tree["seeds"], "seeds")
    values["seeds"] = Seeds(**{role: _seeds(seeds[role], f"seeds.{role}") for role in seeds})
    for name in ("sweep", "vary"):
        axes = _mapping(tree.get(name, {}), name)
        values[name] = {key: tuple(_list(axes, key)) for key in axes}
    values["chosen"] = tuple(_choice(choice) for choice in _list(tree, "chosen"))
    values["runs"] = tuple(_made(PlannedRun, run, "runs") for run in _list(tree, "runs"))
    values["notes"] = tuple(map(str, _list(tree, "notes")))
    confirmed = _list(tree, "confirms")
    values["confirms"] = tuple(_made(Finding, finding, "confirms") for finding in confirmed)
    values["base"] = _mapping(tree["base"], "base")
    for name in ("title", "question", "score"):
        if not isinstance(tree.get(name, ""), str):
            raise ValueError(f"{name} is text, got {tree[name]!r}")
    if type(tree.get("tune_best")) not in (int, type(None)):
        raise ValueError(f"tune_best is a number, got {tree['tune_best']!r}")
    _check_references(values["arms"], values["runs"])
    return Plan(**values)


def _check_references(arms: Sequence[Arm], runs: Sequence[PlannedRun]) -> None:
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1 or not name.isprintable() or not name.strip():
            raise ValueError(f"arm name {name!r} is given twice, empty or not printable")
    for run in runs:
        if run.arm not in names:
            raise ValueError(f"run {run.id} belongs to '{run.arm}', which is no arm")
        parts = PurePath(run.folder).parts
        if not parts or ".." in parts or PurePath(run.folder).is_absolute():
            raise ValueError(f"run {run.id}: folder '{run.folder}' is not inside the comparison")


def _made(kind: Any, tree: Any, place: str) -> Any:
    """An Arm, a Finding or a PlannedRun whose fields have their types."""
    made = kind(**_mapping(tree, place))
    for field_ in fields(kind):
        value = getattr(made, field_.name)
        expected = field_.type if isinstance(field_.type, type) else Mapping
        if not isinstance(value, expected) or isinstance(value, bool):
            words = "a block" if expected is Mapping else expected.__name__
            raise ValueError(f"{place}: '{field_.name}' is {words}, got {value!r}")
    return made


def _choice(tree: Any) -> Choice:
    settings, arm = _mapping(tree["settings"], "chosen"), tree["arm"]
    scores = [(_mapping(tried, "chosen"), score) for tried, score in _list(tree, "scores")]
    if any(isinstance(score, bool) or not isinstance(score, _SCORE) for _, score in scores):
        raise ValueError(f"chosen: scores of '{arm}' are numbers or null")
    return Choice(arm=str(arm), settings=settings, scores=tuple(scores))


def _seeds(values: Any, place: str) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(seed) is not int for seed in values):
        raise ValueError(f"{place} is a list of whole numbers, got {values!r}")
    return tuple(values)


def _mapping(tree: Any, place: str) -> dict[str, Any]:
    if not isinstance(tree, Mapping) or any(not isinstance(key, str) for key in tree):
        raise ValueError(f"'{place}' is a block of names and values, got {tree!r}"[:200])
    return dict(tree)


def _list(tree: Mapping[str, Any], key: str) -> list[Any]:
    values = tree[key] if key == "arms" else tree.get(key, [])
    if not isinstance(values, list):
        raise ValueError(f"'{key}' is a list, got {values!r}"[:200])
    return values


def plain(value: Any) -> Any:
    """The value as YAML has it: dicts, lists and scalars alone."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return value


__all__ = [
    "BASE",
    "PLAN",
    "RESULTS",
    "REWARD",
    "RUNS",
    "SCORE",
    "SEARCH",
    "Arm",
    "Choice",
    "Finding",
    "Plan",
    "PlannedRun",
    "Seeds",
    "check_runs",
    "plain",
    "plan_differences",
    "read_plan",
    "write_plan",
]
