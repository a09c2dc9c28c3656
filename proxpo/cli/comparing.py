"""`proxpo compare`: a plan, its runs, and the report on them."""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from proxpo.compare.confirmation import confirmation
from proxpo.compare.design import make_plan
from proxpo.compare.live import Lines, LiveTable
from proxpo.compare.plan import PLAN, Plan
from proxpo.compare.request import (
    Request,
    overridden,
    parse_arm,
    parse_axes,
    tune_best_decides,
    with_arms,
)
from proxpo.compare.runner import Pool, open_comparison, run_plan
from proxpo.compare.state import planned_state
from proxpo.compare.studies import read_study, studies
from proxpo.errors import ProxpoError, resolve
from proxpo.report.text import plural
from proxpo.settings import contradiction, parse_setting
from proxpo.train.config import task_name
from proxpo.train.domains import domain_of

ENTRY = "proxpo.cli:main"  # called in the process of each run
PRESET = "comparison"  # the config of all runs where none is named
OPTIONS = {"methods": "a method", "settings": "--set"}  # where the name is not the option's
RUNNING = ("jobs", "threads", "on", "out", "retry_failed")  # how it is run, not what is compared


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The arguments of `proxpo compare`."""

    methods: Sequence[str] = ()
    study: str | None = None
    confirm: str | None = None
    config: str | None = None
    model: str | None = None
    task: str | None = None
    settings: Sequence[str] = ()
    seeds: int | None = None
    first_seed: int | None = None
    tune_seeds: int | None = None
    tune_best: int | None = None
    sweep: Sequence[str] = ()
    vary: Sequence[str] = ()
    jobs: int | None = None
    threads: int | None = None
    on: str = "local"
    out: str | None = None
    retry_failed: bool = False

    def refuse_description(self, why: str, *, besides: Sequence[str] = ()) -> None:
        """Refuses options that describe a comparison where a plan is there already."""
        for name in (field.name for field in fields(self)):
            if name in (*RUNNING, *besides) or getattr(self, name) in (None, ()):
                continue
            option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise ProxpoError(f"{option} takes no effect: {why}")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The arguments of `proxpo compare` that a search alone has."""

    budget: str | None = None
    unseen: Sequence[str] = ()
    proposals: str | None = None
    candidates: int | None = None
    finalists: int | None = None

    def refuse_unused(self, why: str = "is an option of a search: add --search") -> None:
        """Refuses options of a search where they have no use."""
        for option in fields(self):
            if getattr(self, option.name) not in (None, ()):
                raise ProxpoError(f"--{option.name} {why}")


def run_comparison(options: CompareOptions) -> int:
    """Makes the plan, its runs and the report; 0 unless no run was finished."""
    console = Console(highlight=False)
    if options.out == "":
        raise ProxpoError("--out takes a folder, got nothing")
    folder = Path(options.out or default_folder(options))
    options = replace(options, on=resolve(options.on, ("local", "ray"), what="place"))
    described = bool(options.methods or options.study or options.confirm)
    if not described and not (folder / PLAN).is_file():
        if options.out is not None:
            raise ProxpoError(f"{folder} holds no comparison to go on with, and none is described")
        raise ProxpoError(
            "no methods to compare: name some (see `proxpo methods`), or --study NAME "
            f"({', '.join(studies())})"
        )
    if not described:
        options.refuse_description(
            f"without methods, --study or --confirm {folder} goes on as it was planned"
        )
    plan = _plan(options) if described else None
    if plan is not None:
        _check_installed(plan)
        _check_task(plan)
    pool = make_pool(options)
    with open_comparison(folder, plan) as plan:
        if not described:
            _check_task(plan, hint="; paths of a comparison are taken from where it was begun")
        console.print(_announcement(plan, folder), soft_wrap=True)
        try:
            with make_display(console) as display:
                plan = run_plan(
                    plan, folder, pool, display=display, retry_failed=options.retry_failed
                )
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise
        return _report(console, plan, folder)


def list_studies() -> None:
    """Prints the shipped studies and their questions."""
    console = Console(highlight=False)
    for name in studies():
        request = read_study(name)
        console.print(
            f"[bold]{name}[/bold]  {escape(request.title)}\n  {escape(request.question)}\n"
        )


def _plan(options: CompareOptions) -> Plan:
    """The plan that the arguments describe."""
    if options.confirm is not None:
        options.refuse_description(
            f"--confirm repeats {options.confirm} as it was planned",
            besides=("confirm", "methods", "seeds", "first_seed"),
        )
        return confirmation(
            options.confirm,
            arms=options.methods,
            seeds=options.seeds,
            first_seed=options.first_seed,
        )
    request = request_of(options)
    if options.tune_seeds is not None and not request.sweep:
        raise ProxpoError(f"--tune-seeds {options.tune_seeds} takes no effect: nothing is swept")
    return make_plan(request)


def request_of(options: CompareOptions) -> Request:
    """The comparison that the arguments describe."""
    pairs = [("model", options.model), ("task", options.task)]
    given = {name: value for name, value in pairs if value is not None}
    settings = [*map(parse_setting, options.settings)]
    for key, value in settings:
        flag = key.removesuffix(".name")
        if given.get(flag, value) != value:
            raise contradiction(f"--{flag} {given[flag]}", key, value)
    sets = [*given.items(), *settings]
    if options.study is None:
        shared = PRESET if domain_of(task_name(sets)).name == "language" else None
        request = Request(arms=[parse_arm(text) for text in options.methods], config=shared)
    else:
        request = read_study(options.study)
        if options.methods:
            request = with_arms(request, options.methods, of=f"study {options.study}")
    request = overridden(
        request,
        base=sets,
        sweep=parse_axes(options.sweep, option="--sweep"),
        vary=parse_axes(options.vary, option="--vary"),
    )
    request = replace(
        request,
        config=options.config or request.config,
        seeds=request.seeds if options.seeds is None else options.seeds,
        first_seed=request.first_seed if options.first_seed is None else options.first_seed,
        tune=request.tune if options.tune_seeds is None else options.tune_seeds,
        tune_best=request.tune_best if options.tune_best is None else options.tune_best,
    )
    if options.tune_best is None and request.tune_best and not tune_best_decides(request):
        return replace(request, tune_best=None)  # the study's own, for a larger sweep
    return request


def default_folder(options: CompareOptions) -> str:
    """Folder of a comparison that is given none, by its arms."""
    words = [*options.methods, *options.vary, *options.sweep]
    if options.study:
        words = [Path(options.study).stem]
    elif options.confirm:
        words = [Path(options.confirm).name, "confirmed"]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words)).strip("-.")
    return f"comparisons/{name[:80] or 'comparison'}"


def _check_installed(plan: Plan) -> None:
    """Refuses a comparison whose runs or report would lack a package."""
    language = domain_of(plan.base["task"]["name"]).name == "language"
    for package in ("matplotlib", "scipy", *(["transformers"] if language else [])):
        if importlib.util.find_spec(package) is None:
            raise ProxpoError(f"comparisons need {package}: pip install 'proxpo[train]'")


def _check_task(plan: Plan, *, hint: str = "") -> None:
    """Refuses a task that cannot be made: it would fail in every run."""
    from proxpo.train.build import check_task

    try:
        check_task(plan.base["task"])
    except ProxpoError as error:
        raise ProxpoError(f"{error}{hint}") from None


def make_pool(options: CompareOptions) -> Pool:
    """The pool of processes or Ray tasks that makes the runs."""
    if options.on == "ray":
        import torch

        from proxpo.compare.cluster import RayPool

        gpus = 1.0 if torch.cuda.is_available() else 0.0
        return RayPool(ENTRY, jobs=options.jobs, threads=options.threads or 1, gpus=gpus)
    from proxpo.compare.local import LocalPool

    preload = ("proxpo.cli.app",)
    return LocalPool(ENTRY, jobs=options.jobs, threads=options.threads, preload=preload)


def make_display(console: Console) -> LiveTable | Lines:
    """A live table, or lines where there is no terminal."""
    return LiveTable(console) if console.is_terminal else Lines(console)


def _announcement(plan: Plan, folder: Path) -> str:
    runs = len(plan.runs) + plan.runs_to_come
    arms = plural(len(plan.arms), "arm")
    title = f"[bold]{escape(plan.title)}[/bold]: {arms}, {plural(runs, 'run')} -> "
    words = [plan.question] if plan.question else []
    done = sum(planned_state(plan, run, folder).status == "done" for run in plan.runs)
    if done:
        words.append(f"{done} of {plural(runs, 'run')} done before; the others continue")
    if done == runs:
        words[-1] = f"all {plural(runs, 'run')} done before: the report is written again"
    words += [f"note: {note}" for note in plan.notes]
    return title + escape("\n".join([str(folder), *words]))


def _report(console: Console, plan: Plan, folder: Path) -> int:
    from proxpo.cli.reporting import write_reports

    for choice in plan.chosen:
        values = ", ".join(f"{key}={value}" for key, value in choice.settings.items())
        console.print(f"chosen for {choice.arm}: {values}", markup=False)
    states = [planned_state(plan, run, folder) for run in plan.runs]
    failed = [run for run, state in zip(plan.runs, states) if state.status == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(plan.runs)} runs failed; --retry-failed tries again")
    write_reports([str(folder)], None)
    return 0 if any(state.status == "done" for state in states) else 1


__all__ = [
    "CompareOptions",
    "SearchOptions",
    "default_folder",
    "list_studies",
    "make_display",
    "make_pool",
    "request_of",
    "run_comparison",
]
