"""`proxpo compare`: a plan, its runs, and the report on them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from proxpo.compare.design import Wish, make_plan, parse_arm, parse_axis
from proxpo.compare.live import Lines, LiveTable
from proxpo.compare.plan import PLAN, Plan
from proxpo.compare.runner import Pool, look, opened, run_plan
from proxpo.compare.studies import read_study, studies
from proxpo.errors import ProxpoError, resolve
from proxpo.settings import parse_setting

PRESET = "comparison"  # what runs share where no config is named


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line."""

    methods: Sequence[str] = ()
    study: str | None = None
    config: str | None = None
    model: str | None = None
    task: str | None = None
    settings: Sequence[str] = ()
    seeds: int | None = None
    tune_seeds: int | None = None
    sweep: Sequence[str] = ()
    vary: Sequence[str] = ()
    jobs: int | None = None
    threads: int | None = None
    on: str = "local"
    out: str | None = None
    retry_failed: bool = False


def compare(asked: Asked) -> int:
    """Make the plan, the runs it asks for and the report; 0 unless no run was finished."""
    console = Console(highlight=False)
    folder = Path(asked.out or _folder(asked))
    asked = replace(asked, on=resolve(asked.on, ("local", "ray"), what="place"))
    given = bool(asked.methods or asked.study)
    if not given and not (folder / PLAN).is_file():
        raise ProxpoError(
            "no methods to compare: name some (see `proxpo methods`), or --study NAME "
            f"({', '.join(studies())})"
        )
    plan = make_plan(_wish(asked)) if given else None
    if plan is not None:
        _check_task(plan)
    pool = _pool(asked)
    with opened(folder, plan) as plan:
        console.print(_announced(plan, folder), soft_wrap=True)
        try:
            with _watch(console) as watch:
                plan = run_plan(plan, folder, pool, watch=watch, retry_failed=asked.retry_failed)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here")
            raise
        return _report(console, plan, folder)


def list_studies() -> None:
    """The shipped studies and their questions."""
    console = Console(highlight=False)
    for name in studies():
        wish = read_study(name)
        console.print(f"[bold]{name}[/bold]  {escape(wish.title)}\n  {escape(wish.question)}\n")


def _wish(asked: Asked) -> Wish:
    if asked.study is None:
        wish = Wish(arms=[parse_arm(one) for one in asked.methods], config=PRESET)
    elif asked.methods:
        raise ProxpoError("--study brings its own methods: name a study or methods, not both")
    else:
        wish = read_study(asked.study)
    pairs = [("model", asked.model), ("task", asked.task)]
    sets = [*((k, v) for k, v in pairs if v is not None), *map(parse_setting, asked.settings)]
    return replace(
        wish,
        base=(*wish.base, *sets),
        config=asked.config or wish.config,
        seeds=wish.seeds if asked.seeds is None else asked.seeds,
        tune=wish.tune if asked.tune_seeds is None else asked.tune_seeds,
        sweep={**wish.sweep, **dict(parse_axis(one, option="--sweep") for one in asked.sweep)},
        vary={**wish.vary, **dict(parse_axis(one, option="--vary") for one in asked.vary)},
    )


def _folder(asked: Asked) -> str:
    words = [Path(asked.study).stem] if asked.study else [*asked.methods, *asked.vary, *asked.sweep]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words)).strip("-.")
    return f"comparisons/{name[:80] or 'comparison'}"


def _check_task(plan: Plan) -> None:
    """A task that cannot be made would fail in every run."""
    from proxpo.train.tasks import make_task

    task = plan.base["task"]
    make_task(
        task["name"],
        reward=task["reward"],
        correct_above=task["correct_above"],
        **task["options"],
    )


def _pool(asked: Asked) -> Pool:
    if asked.on == "ray":
        import torch

        from proxpo.compare.cluster import RayPool

        gpus = 1.0 if torch.cuda.is_available() else 0.0
        return RayPool(jobs=asked.jobs, threads=asked.threads or 1, gpus=gpus)
    from proxpo.compare.local import LocalPool

    return LocalPool(jobs=asked.jobs, threads=asked.threads)


def _watch(console: Console) -> LiveTable | Lines:
    return LiveTable(console) if console.is_terminal else Lines(console)


def _announced(plan: Plan, folder: Path) -> str:
    runs = len(plan.runs) + (len(plan.arms) * len(plan.seeds.report) if plan.sweep else 0)
    title = f"[bold]{escape(plan.title)}[/bold]: {len(plan.arms)} arms, {runs} runs -> "
    words = [plan.question] if plan.question else []
    words += [f"note: {note}" for note in plan.notes]
    return title + escape("\n".join([str(folder), *words]))


def _report(console: Console, plan: Plan, folder: Path) -> int:
    from proxpo.cli.reporting import write_reports

    for one in plan.chosen:
        told = ", ".join(f"{key}={value}" for key, value in one.settings.items())
        console.print(f"chosen for {one.arm}: {told}", markup=False)
    states = [look(plan, run, folder) for run in plan.runs]
    failed = [run for run, state in zip(plan.runs, states) if state.status == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(plan.runs)} runs failed; --retry-failed tries again")
    write_reports([str(folder)], None)
    return 0 if any(state.status == "done" for state in states) else 1


__all__ = ["Asked", "compare", "list_studies"]
