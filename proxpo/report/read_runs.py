"""Reads runs from files: one run, or all runs of a comparison.

A path that holds no run at all is refused; of a damaged run what is there is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxpo.compare.plan import PlannedRun, read_plan
from proxpo.errors import ProxpoError
from proxpo.report.run_data import Comparison, Run, read_log, rows_by_step, seed_in_name
from proxpo.report.text import one_line
from proxpo.report.trainer_logs import read_trainer_log
from proxpo.runs.files import read_object
from proxpo.runs.jsonlines import METRICS, metric_value, missing_steps
from proxpo.runs.status import FAILURE, SUMMARY, Status, status_of
from proxpo.runs.yaml_file import read_yaml
from proxpo.train._schema import SECTIONS
from proxpo.train.sources import SOURCES

ADAPTED = "problems.jsonl"  # beside config.yaml in a run of proxpo adapt
MOST_STEPS = 10_000_000  # a step beyond is no step of a run
LONGEST = 1000  # characters of a reason


def read_comparison(folder: str | Path) -> Comparison:
    """The plan of a comparison's folder and its runs, finished or not."""
    folder = Path(folder)
    plan = read_plan(folder)
    arms = {arm.name: arm for arm in plan.arms}
    runs = tuple(_planned(folder, run, arms[run.arm].method) for run in plan.runs)
    return Comparison(
        folder=folder,
        title=plan.title,
        question=plan.question,
        arms=plan.arms,
        runs=runs,
        chosen=plan.chosen,
        confirms=plan.confirms,
        score=plan.score,
        notes=(*plan.notes, *(note for run in runs for note in run.notes)),
    )


def read_run(path: str | Path) -> Run:
    """A run directory of proxpo, TRL's trainer_state.json (or a folder with one), a verl log."""
    path = Path(path)
    if not path.exists():
        raise ProxpoError(f"{path}: no such run")
    if path.name == METRICS and (path.parent / "config.yaml").exists():
        path = path.parent
    if (path / ADAPTED).is_file() and (path / "config.yaml").is_file():
        raise ProxpoError(f"{path} is a run of proxpo adapt: its report is {path / 'report.html'}")
    if path.is_dir() and any((path / name).exists() for name in ("config.yaml", METRICS)):
        return _read_folder(path, shown=str(path))
    return read_trainer_log(path)


def _planned(folder: Path, planned: PlannedRun, method: str) -> Run:
    """A run of the plan; waiting where nothing was written yet."""
    path = folder / planned.folder
    waiting = Run(name="", method=method, status="waiting")
    run = _read_folder(path, shown=planned.folder) if path.is_dir() else waiting
    if not run.rows and run.status == "running":
        run = replace(run, status="waiting", reason="")
    differing = [
        f"{key} {run.config[key]}"
        for key, value in (("method", method), ("seed", planned.seed))
        if run.config.get(key, value) != value
    ]
    if differing:
        reason = f"its folder holds another run ({', '.join(differing)})"
        run = replace(run, status="failed", reason=reason)
    return replace(
        run,
        name=planned.arm,
        method=method,
        settings=planned.settings,
        seed=planned.seed,
        role=planned.role,
        folder=planned.folder,
    )


def _read_folder(folder: Path, *, shown: str) -> Run:
    """A run directory that `proxpo train` wrote."""
    notes: list[str] = []
    config = _config(folder / "config.yaml", shown, notes)
    summary = _object(folder / SUMMARY, shown, notes)
    failure = _object(folder / FAILURE, shown, notes)
    logged: list[dict[str, Any]] = []
    if (folder / METRICS).exists():
        logged, damage = read_log(folder / METRICS, shown=f"{shown}/{METRICS}")
        notes += damage
        notes += _history_notes(logged, summary or {}, shown)
    read = rows_by_step(logged, shown=f"{shown}/{METRICS}")
    status, reason = _status(config, summary, failure)
    name = one_line(str(config.get("method", folder.name)))
    return Run(
        name=name,
        method=name,
        seed=config.get("seed", seed_in_name(folder.name)),
        status=status,
        reason=one_line(reason),
        folder=one_line(shown),
        command=_command(folder, shown),
        config=config,
        files=_object(folder / SOURCES, shown, notes) or {},
        rows=read.rows,
        broken=read.broken,
        summary={k: v for k, v in (summary or {}).items() if k not in ("config", "samples")},
        notes=tuple(map(one_line, (*notes, *read.notes))),
    )


def _command(folder: Path, shown: str) -> str:
    try:
        return one_line((folder / "command.txt").read_text(errors="replace"))
    except OSError:
        return one_line(f"proxpo train {shown}/config.yaml")


def _history_notes(
    logged: list[dict[str, Any]], summary: Mapping[str, Any], shown: str
) -> list[str]:
    """Steps without a row, and settings that changed when the run was resumed."""
    rows = [
        row for row in logged if type(row.get("step")) is int and 0 <= row["step"] <= MOST_STEPS
    ]
    gap = missing_steps(rows, max((row["step"] for row in rows), default=-1))
    notes = [f"{shown}/{METRICS} has no row of step {gap}"] if gap else []
    changes = summary.get("changes")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, dict):
            setting, step, before, after = map(change.get, ("setting", "step", "before", "after"))
            notes.append(f"{shown}: {setting} changed after step {step}: {before} -> {after}")
    return notes


def _status(
    config: Mapping[str, Any], summary: Mapping[str, Any] | None, failure: Mapping[str, Any] | None
) -> tuple[Status, str]:
    """(status, reason why it is not done)."""
    wanted = metric_value((config.get("train") or {}).get("steps")) or 0.0
    status = status_of(summary, failure, steps=wanted, started=True)
    if status == "done":
        return status, ""
    if status == "failed" and failure is not None:
        step = metric_value(failure.get("step"))
        place = "" if step is None else f" (step {step:g})"
        words = [failure.get(key) for key in ("reason", "type")]
        reason = next((word for word in words if word and isinstance(word, str)), "no reason given")
        return status, f"{reason[:LONGEST]}{place}"
    made = metric_value((summary or {}).get("steps"))
    return status, (
        "has not finished" if made is None else f"stopped after step {made:g} of {wanted:g}"
    )


def _config(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    """The settings of a run; a part that has no such meaning is left out with a note."""
    try:
        config = read_yaml(path) if path.exists() else {}
    except ProxpoError as error:
        notes.append(str(error).replace(str(path), f"{shown}/{path.name}"))
        return {}
    expected: dict[str, type] = dict.fromkeys((*SECTIONS, "recipe"), dict)
    for key, kind in (expected | {"method": str, "seed": int}).items():
        if config.get(key) is None:
            config.pop(key, None)
        elif not isinstance(config[key], kind) or isinstance(config[key], bool):
            notes.append(f"{shown}/{path.name}: '{key}' is no {kind.__name__} and left out")
            del config[key]
    return config


def _object(path: Path, shown: str, notes: list[str]) -> dict[str, Any] | None:
    tree = read_object(path)
    if tree is None and path.exists():
        notes.append(f"{shown}/{path.name} is damaged and left out")
    return tree


__all__ = ["read_comparison", "read_run"]
