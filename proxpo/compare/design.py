"""Makes a plan from a request: arms, settings, seeds and runs, all checked beforehand.

    plan = make_plan(Request(arms=[parse_arm("grpo"), parse_arm("isopo:overlap=16")], seeds=3))

A setting is named as everywhere (`lr`, `train.lr`, `clip_high`, `ratio.q`); `clip_low+clip_high`
varies two settings together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.compare.arms import (
    PLANNED,
    Axes,
    Settings,
    combinations,
    fits,
    make_arm,
    parts_of,
    paths_by_arm,
    place_of,
    places_of,
    refuse_same_place,
    scalar,
    split_settings,
    swept_settings,
)
from proxpo.compare.naming import run_name, set_text, setting_key
from proxpo.compare.plan import (
    RUNS,
    Arm,
    Choice,
    Plan,
    PlannedRun,
    Seeds,
    check_runs,
    plain,
    plan_differences,
)
from proxpo.compare.request import Request, tune_best_decides
from proxpo.errors import ProxpoError
from proxpo.models import check_name
from proxpo.recipes import method
from proxpo.runs.yaml_file import read_yaml
from proxpo.train._schema import leaves
from proxpo.train.config import Config, as_dict, differences, find, load_config, spread
from proxpo.train.domains import domain_of
from proxpo.train.refusals import unused
from proxpo.train.sources import whole_paths
from proxpo.types import Recipe

TUNING = 1000  # the first tuning seed, far from those that are reported
LONGEST = 200  # characters of an arm's name
OWN = ("recipe", *PLANNED)  # of each run, not of the base


def make_plan(request: Request) -> Plan:
    """The plan, with the runs that need no choice; refuses every mistake and writes nothing."""
    if not request.arms:
        raise ProxpoError("no methods to compare: name some (see `proxpo methods`), or --study")
    report = report_seeds(request.first_seed, request.seeds)
    if request.sweep and request.tune < 1:
        raise ProxpoError("a sweep needs at least one tuning seed")
    arms, pairs = _with_shared(request, [make_arm(*arm) for arm in request.arms])
    base = _base(request.config, pairs, arms)
    if domain_of(base["task"]["name"]).name == "language":
        check_name(base["model"]["name"])
    arms, notes = _with_file_recipe(request.config, arms)
    sweep, vary = _axes(request.sweep, "--sweep"), _axes(request.vary, "--vary")
    _refuse_set(pairs, arms, sweep, "swept")
    _refuse_set(pairs, arms, vary, "varied")
    arms, more = _varied(arms, vary)
    notes += more
    base, more = _with_problems(base, arms)
    notes += more
    notes += _check_sweep(arms, sweep, vary)
    notes += _check_tune_best(request)
    _check_names(arms)
    first = max(TUNING, report.stop)
    seeds = Seeds(
        report=tuple(report),
        tune=tuple(range(first, first + request.tune)) if sweep else (),
    )
    plan = Plan(
        title=request.title or title_of(arms),
        question=request.question,
        base=base,
        arms=tuple(arms),
        seeds=seeds,
        sweep=sweep,
        tune_best=request.tune_best,
        vary=vary,
        score=request.score,
        notes=(*request.notes, *notes),
    )
    plan = replace(plan, notes=(*plan.notes, *_equal_arms(plan)))
    return check_runs(replace(plan, runs=tuple(first_runs(plan))))


def title_of(arms: Iterable[Arm]) -> str:
    """The title of a comparison that is given none: its arms, varied ones once."""
    return " · ".join(dict.fromkeys(arm.family for arm in arms))


def report_seeds(first: int, count: int) -> range:
    """The seeds that are reported, refused unless there are some."""
    if count < 1:
        raise ProxpoError("a comparison needs at least one seed")
    if first < 0:
        raise ProxpoError(f"the first seed is 0 or more, got {first}")
    return range(first, first + count)


def with_more_arms(stored: Plan, plan: Plan) -> Plan | None:
    """`plan`, its runs in the folders of `stored`; None if it is not `stored` with arms added."""
    before, after = ([repr(plain(arm)) for arm in each.arms] for each in (stored, plan))
    if set(before) - set(after) or plan_differences(replace(stored, arms=plan.arms), plan):
        return None
    first = {_identity(run) for run in plan.runs}
    later = [run for run in stored.runs if _identity(run) not in first]  # chosen again
    return _with_runs(replace(plan, runs=stored.runs), plan.runs, later)


def first_runs(plan: Plan) -> list[PlannedRun]:
    """The runs that are known from the start: all of them, or with a sweep those that tune.

    Where only an arm's best settings go on, these are the runs of the first tuning seed.
    """
    if not plan.sweep:
        return [_run(plan, arm, {}, seed, "") for seed in plan.seeds.report for arm in plan.arms]
    seeds = plan.seeds.tune if plan.tune_best is None else plan.seeds.tune[:1]
    return [
        _run(plan, arm, swept, seed, "tune")
        for seed in seeds
        for arm in plan.arms
        for swept in swept_settings(arm, plan.sweep)
    ]


def with_tuned_on(plan: Plan, best: Mapping[str, Sequence[Settings]]) -> Plan:
    """The plan with the runs of the other tuning seeds, at these settings of each named arm.

    A run that the plan holds already keeps its folder; so it does in `with_choices`.
    """
    further = [
        _run(plan, arm, swept, seed, "tune")
        for seed in plan.seeds.tune[1:]
        for arm in plan.arms
        for swept in best.get(arm.name, ())
    ]
    first = [run for run in plan.runs if run.role == "tune" and run.seed == plan.seeds.tune[0]]
    return _with_runs(plan, first, further, [run for run in plan.runs if run.role == "report"])


def with_choices(plan: Plan, chosen: Sequence[Choice]) -> Plan:
    """The plan with its choices made and the report runs that follow from them."""
    best = {choice.arm: choice.settings for choice in chosen}
    later = [
        _run(plan, arm, best[arm.name], seed, "report")
        for seed in plan.seeds.report
        for arm in plan.arms
        if arm.name in best
    ]
    tuning = [run for run in plan.runs if run.role != "report"]
    return _with_runs(replace(plan, chosen=tuple(chosen)), tuning, later)


def _with_runs(plan: Plan, *parts: Sequence[PlannedRun]) -> Plan:
    """The plan with these runs alone; those that it holds already keep their folders."""
    known = {_identity(run): run for run in plan.runs}
    runs = [known.get(_identity(run), run) for part in parts for run in part]
    return check_runs(replace(plan, runs=tuple(runs)))


def _identity(run: PlannedRun) -> tuple[str, int, str, str]:
    """The parts of a planned run that decide its numbers."""
    return run.arm, run.seed, run.role, setting_key(run.settings)


def command(plan: Plan, run: PlannedRun, folder: str | Path) -> list[str]:
    """The arguments of `proxpo` that make this run, or continue it."""
    arm = plan.arm(run.arm)
    settings = {**arm.settings, **split_settings(run.settings)}
    sets = [word for k, v in settings.items() for word in ("--set", f"{k}={set_text(v)}")]
    where = ["--seed", str(run.seed), "--out", str(Path(folder) / run.folder), "--resume"]
    return ["train", str(Path(folder) / "base.yaml"), "--method", arm.method, *sets, *where]


def repeating_command(plan: Plan, run: PlannedRun) -> list[str]:
    """The arguments of `proxpo` that make this run again in any folder, in one of its own.

    They hold every setting that is not a default, and whole paths of local files.
    """
    arm, config = plan.arm(run.arm), config_of(plan, run)
    own = {**arm.settings, **split_settings(run.settings)}
    given = {"method": arm.method, "seed": run.seed, "task": config.task.name}
    given |= {"model": config.model.name}
    idle = unused(config, config.make_method())
    apart = [
        (path, value)
        for change in differences(load_config(None, own.items(), overrides=given), config)
        if change.path not in idle and change.path != "out"
        for path, value in spread(change.path, change.after)
    ]
    words = [f"--{key}={whole_paths(str(value), config)}" for key, value in given.items()]
    for path, value in [*apart, *own.items()]:
        shown = whole_paths(value, config) if isinstance(value, str) else set_text(value)
        words += ["--set", f"{path}={shown}"]
    return ["train", *words, "--out", f"again/{Path(run.folder).name}"]


def config_of(plan: Plan, run: PlannedRun) -> Config:
    """The whole config of a run."""
    arm = plan.arm(run.arm)
    sets = [*arm.settings.items(), *split_settings(run.settings).items()]
    return load_config(plan.base, sets, overrides={"method": arm.method, "seed": run.seed})


def _axes(axes: Axes, option: str) -> dict[str, tuple[Any, ...]]:
    """The values of each swept or varied setting, each of them once."""
    checked: dict[str, tuple[Any, ...]] = {}
    for key, values in axes.items():
        checked[key] = tuple(scalar(value, f"{option} {key}") for value in values)
        if len(set(map(set_text, checked[key]))) < len(checked[key]):
            raise ProxpoError(f"{option} {key}: a value is given twice")
    return checked


def _with_shared(request: Request, arms: list[Arm]) -> tuple[list[Arm], list[tuple[str, Any]]]:
    """Settings of all runs: those of the run go to the base, those of a method to its arms.

    A later setting replaces an earlier one; what an arm sets itself stays.
    """
    base: list[tuple[str, Any]] = []
    shared: dict[str, Settings] = {arm.name: {} for arm in arms}
    for name, key, value in _each_setting(request.base):
        scope, colon, _ = name.rpartition(":")
        chosen = [arm for arm in arms if not colon or arm.method == method(scope).slug]
        if not chosen:
            raise ProxpoError(f"--set {name}: {method(scope).slug} is not compared here")
        paths = paths_by_arm(key, chosen)
        _refuse_partial(key, value, chosen, paths)
        if not colon and all(path[0] != "recipe" for path in paths.values()):
            base.append((".".join(next(iter(paths.values()))), value))
            continue
        for arm_name in paths:
            shared[arm_name][key] = value
    return [replace(arm, settings={**shared[arm.name], **arm.settings}) for arm in arms], base


def _each_setting(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Name, key and value of each setting; `grpo:clip_low+clip_high` holds two."""
    for name, value in pairs:
        for key in parts_of(name.rpartition(":")[2]):
            yield name, key, value


def _refuse_partial(key: str, value: Any, arms: Sequence[Arm], paths: Mapping[str, Any]) -> None:
    """Refuses a setting of all arms that some arm does not have."""
    lacking = [arm for arm in arms if arm.name not in paths]
    if not lacking:
        return
    try:
        place_of(key, lacking[0])
        reason = ""
    except ProxpoError as error:
        reason = f"{lacking[0].name}: {error}"
    slugs = dict.fromkeys(arm.method for arm in arms if arm.name in paths)
    names = ", ".join(arm.name for arm in lacking)
    apart = " ".join(f"--set {slug}:{key}={set_text(value)}" for slug in slugs)
    raise ProxpoError(
        f"--set {key}={set_text(value)} does not apply to {names} ({reason}): set it for the "
        f"others alone, {apart}"
    )


def _base(source: str | None, pairs: list[tuple[str, Any]], arms: Sequence[Arm]) -> Settings:
    """The settings of all runs; those that a method brings are left to the arms, without a file."""
    tree = as_dict(load_config(source, pairs))
    written = {path for path, _ in pairs}
    own = {path for arm in arms for path in method(arm.method).settings}
    for path in own - written if source is None else ():
        section, _, name = path.rpartition(".")
        del tree[section][name]
    return {key: value for key, value in tree.items() if key not in OWN}


def _with_problems(base: Settings, arms: list[Arm]) -> tuple[Settings, list[str]]:
    """The same training problems for all arms, where some arms would take a pool by themselves."""
    own = {
        arm.name: load_config(
            base, list(arm.settings.items()), overrides={"method": arm.method}
        ).task.problems
        for arm in arms
        if all(place_of(key, arm) != ["task", "problems"] for key in arm.settings)
    }
    needing = [name for name, problems in own.items() if problems is not None]
    if base["task"]["problems"] is not None or not needing:
        return base, []
    problems = max(value for value in own.values() if value is not None)
    note = (
        f"all arms train on the same {problems} problems: {', '.join(needing)} "
        f"{'learns' if len(needing) == 1 else 'learn'} from problems that come again"
    )
    return {**base, "task": {**base["task"], "problems": problems}}, [note]


def _with_file_recipe(source: str | None, arms: list[Arm]) -> tuple[list[Arm], list[str]]:
    """A config file's recipe block belongs to the file's method; arms may override it."""
    if source is None:
        return arms, []
    read = read_yaml(find(source))
    own, recipe = method(str(read.get("method", Config().method))).slug, read.get("recipe") or {}
    others = [arm.name for arm in arms if arm.method != own]
    text = ", ".join(f"{key}={set_text(value)}" for key, value in recipe.items())
    lone = "alone" if len(others) < len(arms) else "alone, and no arm is that: left out"
    words = {path.rpartition(".")[2] for path, *_ in leaves(Config)}  # of other settings too
    written = {f"recipe.{key}" if key in words else key: value for key, value in recipe.items()}
    changed = [
        replace(arm, settings={**written, **arm.settings}) if arm.method == own else arm
        for arm in arms
    ]
    return changed, [f"recipe of {source} ({text}): for {own} {lone}"] if recipe and others else []


def _varied(arms: list[Arm], vary: Axes) -> tuple[list[Arm], list[str]]:
    """Each arm once for every combination of the varied values it has settings for."""
    varied: list[Arm] = []
    notes: list[str] = []
    for key in vary:
        paths_by_arm(key, arms)
    for arm in arms:
        fitting = {key: values for key, values in vary.items() if fits(key, arm)}
        _refuse_twice(arm, fitting, "varied")
        notes += [
            f"{arm.name} has no setting {key}: it stands once" for key in vary.keys() - fitting
        ]
        for values in combinations(fitting):
            words = (f"{key}={set_text(value)}" for key, value in values.items())
            varied.append(
                replace(
                    arm,
                    name=" ".join([arm.name, *words]),
                    settings={**arm.settings, **split_settings(values)},
                    varied=values,
                )
            )
    return varied, notes


def _check_sweep(arms: list[Arm], sweep: Axes, vary: Axes) -> list[str]:
    """Refuses axes that no arm has; a note where arms have unequally many settings."""
    for key in sweep:
        if key in vary:
            raise ProxpoError(f"'{key}' cannot be both swept and varied")
        paths_by_arm(key, arms)
    for arm in arms:
        _refuse_twice(arm, sweep, "swept")
    tried = {arm.name: len(swept_settings(arm, sweep)) for arm in arms}
    if len(set(tried.values())) < 2:
        return []
    counts = ", ".join(f"{name} {count}" for name, count in tried.items())
    return [f"unequal tuning effort, settings tried: {counts}"]


def _check_tune_best(request: Request) -> list[str]:
    """Refuses a number of best settings that decides nothing; says what it does otherwise."""
    best = request.tune_best
    if best is None:
        return []
    if not tune_best_decides(request):
        raise ProxpoError(
            f"--tune-best {best} takes no effect: it needs two tuning seeds or more, and a sweep "
            "of more than that many settings, at least two of which go on"
        )
    return [f"after the first tuning seed the best {best} settings of each arm went on"]


def _check_names(arms: list[Arm]) -> None:
    names = [arm.name for arm in arms]
    for name in names:
        if not name.strip() or not name.isprintable() or len(name) > LONGEST:
            raise ProxpoError(
                f"arm name {name[:40]!r}: expected 1 to {LONGEST} characters that can be printed"
            )
        if names.count(name) > 1:
            raise ProxpoError(
                f"'{name}' is compared with itself: {names.count(name)} arms are equal"
            )


def _equal_arms(plan: Plan) -> list[str]:
    """A line for each arm that is another one under a second name, as `clip_low=0.2` of grpo."""
    first: dict[str, str] = {}
    lines = []
    for arm in plan.arms:
        if sum(other.method == arm.method for other in plan.arms) < 2:
            continue
        config = load_config(plan.base, arm.settings.items(), overrides={"method": arm.method})
        made = config.make_method()
        if not isinstance(made, Recipe):
            continue
        stages = [(place, stage.name, stage.options) for place, stage in made.stages()]
        own = {key: value for key, value in as_dict(config).items() if key != "recipe"}
        other = first.setdefault(repr((own, stages)), arm.name)
        if other != arm.name:
            lines.append(f"{arm.name} and {other} are one method: every setting is equal")
    return lines


def _refuse_twice(arm: Arm, axes: Iterable[str], what: str) -> None:
    refuse_same_place((key for key in axes if fits(key, arm)), arm)
    own = {tuple(place_of(key, arm)) for key in arm.settings}
    for key in axes:
        if any(tuple(place_of(part, arm)) in own for part in parts_of(key) if fits(key, arm)):
            raise ProxpoError(f"{arm.name} sets {key} itself, so it cannot be {what}")


def _refuse_set(
    pairs: Sequence[tuple[str, Any]], arms: Sequence[Arm], axes: Iterable[str], what: str
) -> None:
    """Refuses a setting of all runs that every run would replace."""
    for key in axes:
        for path, value in pairs:
            if path in places_of(key, arms):
                text = f"--set {path}={set_text(value)} takes no effect"
                raise ProxpoError(f"{text}: {key} is {what}; leave one of the two out")


def _run(plan: Plan, arm: Arm, swept: Mapping[str, Any], seed: int, role: str) -> PlannedRun:
    name = f"{run_name(arm, swept)}-seed{seed}"
    run = PlannedRun(
        id=name,
        arm=arm.name,
        settings={**arm.varied, **swept},
        seed=seed,
        role=role,
        folder=f"{RUNS}/{name}",
    )
    try:
        return replace(run, steps=config_of(plan, run).train.steps)
    except ProxpoError as error:
        raise ProxpoError(f"{arm.name}: {error}") from None


__all__ = [
    "command",
    "config_of",
    "first_runs",
    "make_plan",
    "report_seeds",
    "title_of",
    "with_choices",
    "with_more_arms",
    "with_tuned_on",
]
