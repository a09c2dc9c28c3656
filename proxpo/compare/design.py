"""From what was asked for to a plan: arms, settings, seeds and runs, all checked beforehand.

    plan = make_plan(Wish(methods=("grpo", "isopo:overlap=16"), seeds=3, vary={"temperature": ...}))

A setting is named as everywhere (`lr`, `train.lr`, `clip_high`, `ratio.q`); `clip_low+clip_high`
varies two settings together.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxpo.compare.plan import RUNS, SCORE, Arm, Choice, Plan, PlannedRun, Seeds
from proxpo.errors import ProxpoError
from proxpo.recipes import method
from proxpo.settings import parse_setting, parse_value
from proxpo.train._schema import place
from proxpo.train.config import Config, as_dict, find, load_config, read_yaml

TUNING = 1000  # the first tuning seed, far from those that are reported
OWN = ("method", "recipe", "seed", "out")  # what a base does not hold: each run has its own
Settings = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for, by a command line or a study.

    arms: (name or none, method, settings); base: settings of all runs, or of one method where the
    key reads METHOD:KEY; seeds: how many are reported; tune: how many the sweep is judged on.
    """

    arms: Sequence[tuple[str | None, str, Mapping[str, Any]]]
    seeds: int = 3
    tune: int = 2
    config: str | None = None
    base: Sequence[tuple[str, Any]] = ()
    sweep: Axes = field(default_factory=dict)
    vary: Axes = field(default_factory=dict)
    title: str = ""
    question: str = ""
    score: str = SCORE


def make_plan(wish: Wish) -> Plan:
    """The plan, with the runs that need no choice; nothing is written, every mistake is found."""
    if not wish.arms:
        raise ProxpoError("no methods to compare: name some (see `proxpo methods`), or --study")
    if wish.seeds < 1 or (wish.sweep and wish.tune < 1):
        raise ProxpoError("a comparison needs at least one seed")
    arms, pairs = _with_shared(wish, [_arm(*one) for one in wish.arms])
    base = _base(wish.config, pairs)
    arms = _with_file_recipe(wish.config, arms)
    arms, notes = _varied(arms, wish.vary)
    notes += _check_sweep(arms, wish.sweep, wish.vary)
    _check_names(arms)
    seeds = Seeds(
        report=tuple(range(wish.seeds)),
        tune=tuple(range(TUNING, TUNING + wish.tune)) if wish.sweep else (),
    )
    plan = Plan(
        title=wish.title or " · ".join(dict.fromkeys(arm.family for arm in arms)),
        question=wish.question,
        base=base,
        arms=tuple(arms),
        seeds=seeds,
        sweep={key: tuple(values) for key, values in wish.sweep.items()},
        vary={key: tuple(values) for key, values in wish.vary.items()},
        score=wish.score,
        notes=tuple(notes),
    )
    return replace(plan, runs=tuple(first_runs(plan)))


def parse_arm(text: str) -> tuple[None, str, Settings]:
    """`grpo:clip_low=0.4,clip_high=0.4`; a comma only separates where a KEY= follows."""
    name, colon, rest = text.partition(":")
    settings: Settings = {}
    if colon and not rest:
        raise ProxpoError(f"'{text}': expected METHOD:KEY=VALUE")
    for part in re.split(r",(?=[^,=]+=)", rest) if rest else []:
        key, value = parse_setting(part)
        settings[key] = value
    return None, name, settings


def parse_axis(text: str, *, option: str) -> tuple[str, tuple[Any, ...]]:
    """`lr=1e-5,3e-5` as a key and its values."""
    key, equals, values = text.partition("=")
    found = tuple(parse_value(one.strip()) for one in values.split(",") if one.strip())
    if not key.strip() or not equals or not found:
        raise ProxpoError(f"{option} takes KEY=VALUE,VALUE..., got '{text}'")
    if len(set(map(str, found))) < len(found):
        raise ProxpoError(f"{option} {key.strip()}: a value is given twice")
    return key.strip(), found


def first_runs(plan: Plan) -> list[PlannedRun]:
    """The runs that are known from the start: all of them, or with a sweep those that tune."""
    if not plan.sweep:
        return [_run(plan, arm, {}, seed, "") for seed in plan.seeds.report for arm in plan.arms]
    return [
        _run(plan, arm, swept, seed, "tune")
        for seed in plan.seeds.tune
        for arm in plan.arms
        for swept in swept_settings(arm, plan.sweep)
    ]


def with_choices(plan: Plan, chosen: Sequence[Choice]) -> Plan:
    """The plan with its choices made and the report runs that follow from them."""
    best = {one.arm: one.settings for one in chosen}
    later = [
        _run(plan, arm, best[arm.name], seed, "report")
        for seed in plan.seeds.report
        for arm in plan.arms
        if arm.name in best
    ]
    return replace(plan, chosen=tuple(chosen), runs=(*first_runs(plan), *later))


def swept_settings(arm: Arm, sweep: Axes) -> list[Settings]:
    """Every combination of the swept values that this arm has settings for."""
    fitting = {key: values for key, values in sweep.items() if _fits(key, arm)}
    return _grid(fitting)


def command(plan: Plan, run: PlannedRun, folder: str | Path) -> list[str]:
    """The arguments of `proxpo` that make this run, or continue it."""
    arm = plan.arm(run.arm)
    given = {**arm.settings, **_single(run.settings)}
    sets = [word for k, v in given.items() for word in ("--set", f"{k}={shown(v)}")]
    where = ["--seed", str(run.seed), "--out", str(Path(folder) / run.folder), "--resume"]
    return ["train", str(Path(folder) / "base.yaml"), "--method", arm.method, *sets, *where]


def config_of(plan: Plan, run: PlannedRun) -> Config:
    """The whole config of a run."""
    arm = plan.arm(run.arm)
    sets = [*arm.settings.items(), *_single(run.settings).items()]
    return load_config(plan.base, sets, overrides={"method": arm.method, "seed": run.seed})


def shown(value: Any) -> str:
    """A value as `--set` reads it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _arm(name: str | None, slug: str, settings: Mapping[str, Any]) -> Arm:
    chosen = method(slug).slug
    for key, value in settings.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise ProxpoError(f"{chosen}: '{key}' takes one value, got {value!r}")
    label = name or " ".join([chosen, *(f"{k}={shown(v)}" for k, v in settings.items())])
    arm = Arm(name=label, method=chosen, settings=dict(settings), family=label)
    for key in settings:
        _placed(key, arm)
    return arm


def _with_shared(wish: Wish, arms: list[Arm]) -> tuple[list[Arm], list[tuple[str, Any]]]:
    """Settings of all runs: those of the run go to the base, those of a method to its arms.

    A later setting replaces an earlier one; what an arm sets itself stays.
    """
    base: list[tuple[str, Any]] = []
    shared: dict[str, Settings] = {arm.name: {} for arm in arms}
    for given, value in wish.base:
        scope, colon, key = given.rpartition(":")
        chosen = [arm for arm in arms if not colon or arm.method == method(scope).slug]
        if not chosen:
            raise ProxpoError(f"--set {given}: {method(scope).slug} is not compared here")
        paths = _paths(key, chosen)
        if not colon and all(path[0] != "recipe" for path in paths.values()):
            base.append((".".join(next(iter(paths.values()))), value))
            continue
        for name in paths:
            shared[name][key] = value
    return [replace(arm, settings={**shared[arm.name], **arm.settings}) for arm in arms], base


def _base(source: str | None, pairs: Iterable[tuple[str, Any]]) -> Settings:
    tree = as_dict(load_config(source, list(pairs)))
    return {key: value for key, value in tree.items() if key not in OWN}


def _with_file_recipe(source: str | None, arms: list[Arm]) -> list[Arm]:
    """A config file's recipe block belongs to the file's method; arms may override it."""
    if source is None:
        return arms
    read = read_yaml(find(source))
    own, recipe = method(str(read.get("method", Config().method))).slug, read.get("recipe") or {}
    return [
        replace(arm, settings={**recipe, **arm.settings}) if arm.method == own else arm
        for arm in arms
    ]


def _varied(arms: list[Arm], vary: Axes) -> tuple[list[Arm], list[str]]:
    """Each arm once for every combination of the varied values it has settings for."""
    found: list[Arm] = []
    notes: list[str] = []
    for key in vary:
        _paths(key, arms)
    for arm in arms:
        fitting = {key: values for key, values in vary.items() if _fits(key, arm)}
        _refuse_twice(arm, fitting, "varied")
        notes += [
            f"{arm.name} has no setting {key}: it stands once" for key in vary.keys() - fitting
        ]
        for values in _grid(fitting):
            words = (f"{key}={shown(value)}" for key, value in values.items())
            found.append(
                replace(
                    arm,
                    name=" ".join([arm.name, *words]),
                    settings={**arm.settings, **_single(values)},
                    varied=values,
                )
            )
    return found, notes


def _check_sweep(arms: list[Arm], sweep: Axes, vary: Axes) -> list[str]:
    """Every arm gets the same number of settings, or the report says otherwise."""
    for key in sweep:
        if key in vary:
            raise ProxpoError(f"'{key}' cannot be both swept and varied")
        _paths(key, arms)
    for arm in arms:
        _refuse_twice(arm, sweep, "swept")
    tried = {arm.name: len(swept_settings(arm, sweep)) for arm in arms}
    if len(set(tried.values())) < 2:
        return []
    told = ", ".join(f"{name} {count}" for name, count in tried.items())
    return [f"unequal tuning effort, settings tried: {told}"]


def _check_names(arms: list[Arm]) -> None:
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise ProxpoError(
                f"'{name}' is compared with itself: {names.count(name)} arms are equal"
            )


def _refuse_twice(arm: Arm, axes: Iterable[str], what: str) -> None:
    own = {tuple(_placed(key, arm)) for key in arm.settings}
    for key in axes:
        if any(tuple(_placed(part, arm)) in own for part in _parts(key) if _fits(key, arm)):
            raise ProxpoError(f"{arm.name} sets {key} itself, so it cannot be {what}")


def _paths(key: str, arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Where the setting lies for each arm that has it; an error if none does."""
    found: dict[str, list[str]] = {}
    errors: list[ProxpoError] = []
    for arm in arms:
        try:
            found[arm.name], *_ = [_placed(part, arm) for part in _parts(key)]
        except ProxpoError as error:
            errors.append(error)
    # A setting of the run belongs to all; only a method's own option may be missing elsewhere.
    if (errors and any(path[0] != "recipe" for path in found.values())) or not found:
        raise errors[0]
    return found


def _fits(key: str, arm: Arm) -> bool:
    try:
        return all(_placed(part, arm) for part in _parts(key))
    except ProxpoError:
        return False


def _placed(key: str, arm: Arm) -> list[str]:
    return place(key, method(arm.method).defaults)


def _parts(key: str) -> list[str]:
    """`clip_low+clip_high` is two settings; `weights+` is one, which adds a stage."""
    return [key] if key.endswith("+") else key.split("+")


def _single(settings: Mapping[str, Any]) -> Settings:
    return {part: value for key, value in settings.items() for part in _parts(key)}


def _grid(axes: Axes) -> list[Settings]:
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def _run(plan: Plan, arm: Arm, swept: Mapping[str, Any], seed: int, role: str) -> PlannedRun:
    words = [arm.name, *(f"{key}={shown(value)}" for key, value in swept.items())]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).strip("-.")
    if len(name) > 80 or name != name.lower():  # also where upper and lower case are one
        name = f"{name[:60].lower()}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"
    run = PlannedRun(
        id=f"{name}-seed{seed}",
        arm=arm.name,
        settings={**arm.varied, **swept},
        seed=seed,
        role=role,
        folder=f"{RUNS}/{name}-seed{seed}",
    )
    try:
        return replace(run, steps=config_of(plan, run).train.steps)
    except ProxpoError as error:
        raise ProxpoError(f"{arm.name}: {error}") from None


__all__ = [
    "Wish",
    "command",
    "config_of",
    "first_runs",
    "make_plan",
    "parse_arm",
    "parse_axis",
    "shown",
    "swept_settings",
    "with_choices",
]
