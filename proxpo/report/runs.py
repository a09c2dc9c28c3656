"""Training runs read from files: one run, or all runs of a comparison.

Reading never fails for a damaged line or a missing end: what is there is read and what is not is
said in `notes`. A path that holds no run at all is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.compare.plan import Arm, Choice, PlannedRun, read_plan, read_tree
from proxpo.compare.state import measured, parsed
from proxpo.errors import ProxpoError
from proxpo.report.facts import count, one_line
from proxpo.runs.sinks import missing_steps
from proxpo.train._schema import SECTIONS

MOST_STEPS = 10_000_000  # a step beyond is no step of a run
Row = Mapping[str, float]
LONGEST = 1000  # characters of a reason
MOST_NOTES = 4  # on the damaged lines of one file
LAST_STEP = 1 << 53  # the last whole number up to which all are exact in float64


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, wherever it was made."""

    name: str  # the arm: what is compared, the same for all seeds
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)  # what sets it apart: swept, varied
    seed: int | None = None  # None: not recorded, so it can be paired with no other run
    role: str = ""  # "tune": settings were chosen on it; "report" or "": it is reported
    status: str = "done"  # "done" | "failed" | "running" | "waiting"
    reason: str = ""  # why it is not done
    folder: str = ""  # relative to the comparison
    command: str = ""  # repeats it
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()  # one per step; a metric that was not measured is absent
    # the first step at which a metric was logged as NaN, infinity, text or beyond float32
    broken: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    source: str = "proxpo"  # "proxpo" | "trl" | "verl"
    notes: tuple[str, ...] = ()  # what could not be read


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that answer one question. `score` names the metric that ranks, "" leaves the choice."""

    folder: Path
    title: str
    question: str = ""
    arms: tuple[Arm, ...] = ()
    runs: tuple[Run, ...] = ()
    chosen: tuple[Choice, ...] = ()
    score: str = ""
    notes: tuple[str, ...] = ()


def read_comparison(folder: str | Path) -> Comparison:
    """The plan of a comparison's folder and its runs, finished or not."""
    folder = Path(folder)
    plan = read_plan(folder)
    arms = {arm.name: arm for arm in plan.arms}
    runs = tuple(_planned(folder, one, arms[one.arm].method) for one in plan.runs)
    return Comparison(
        folder=folder,
        title=plan.title,
        question=plan.question,
        arms=plan.arms,
        runs=runs,
        chosen=plan.chosen,
        score=plan.score,
        notes=(*plan.notes, *(note for run in runs for note in run.notes)),
    )


def read_run(path: str | Path, *, name: str = "") -> Run:
    """A run directory of proxpo, TRL's trainer_state.json (or a folder with one), a verl log."""
    from proxpo.report import foreign

    path = Path(path)
    if not path.exists():
        raise ProxpoError(f"{path}: no such run")
    if path.name == "metrics.jsonl" and (path.parent / "config.yaml").exists():
        path = path.parent
    if path.is_dir() and any((path / one).exists() for one in ("config.yaml", "metrics.jsonl")):
        run = _own(path, shown=str(path))
    else:
        run = foreign.read(path)
    return replace(run, name=name) if name else run


def read_lines(path: Path, *, shown: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a file, line by line, and a sentence for each that is damaged."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        return [], [f"{shown} cannot be read: {(error.strerror or str(error)).lower()}"]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parsed(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number == len(lines):
            notes.append(f"{shown}: the last line is cut off; {len(rows)} lines before it stand")
        else:
            notes.append(f"{shown}: line {number} is damaged and left out")
    if len(notes) > MOST_NOTES:
        more = len(notes) - MOST_NOTES + 1
        notes = [*notes[: MOST_NOTES - 1], f"{shown}: {more} more lines are damaged and left out"]
    return rows, notes


class Rows(NamedTuple):
    """Rows of a log in order of steps, the broken metrics, and a note on rows that are left out."""

    rows: tuple[Row, ...]
    broken: dict[str, float]
    notes: list[str]


def rows_of(logged: Iterable[Mapping[str, Any]], *, shown: str) -> Rows:
    """One row a step; a value that is logged again for a step replaces the earlier.

    A null was not measured. A step is a whole number from 0 on; a row without one is left out.
    """
    merged: dict[float, dict[str, float]] = {}
    broken: dict[str, float] = {}
    lost = 0
    for row in logged:
        step = measured(row.get("step"))
        if step is None or not 0 <= step <= LAST_STEP or step != int(step):
            lost += 1
            continue
        values = merged.setdefault(step, {})
        for key, value in row.items():
            name = key if key.isprintable() else one_line(key)
            number = measured(value)
            if number is not None:
                values[name] = number
            elif value is not None:
                values.pop(name, None)
                broken[name] = min(step, broken.get(name, step))
    notes = [f"{shown}: {count(lost, 'row')} without a step from 0 on left out"] if lost else []
    return Rows(tuple(merged[step] for step in sorted(merged)), broken, notes)


def seed_in(text: str) -> int | None:
    """The seed that a name tells: `grpo-seed3`, `run_s3`, `seed=3`."""
    found = re.search(r"(?:^|[-_./= ])(?:seed|s)[-_= ]?(\d+)(?=$|[-_./ ])", text, re.IGNORECASE)
    return int(found[1]) if found and len(found[1]) < 19 else None


def _planned(folder: Path, planned: PlannedRun, method: str) -> Run:
    """A run of the plan; where nothing was written yet it waits."""
    path = folder / planned.folder
    run = _own(path, shown=planned.folder) if path.is_dir() else Run(name="", method=method)
    if not run.rows and run.status != "failed":
        run = replace(run, status="waiting", reason="")
    other = [
        f"{key} {run.config[key]}"
        for key, value in (("method", method), ("seed", planned.seed))
        if run.config.get(key, value) != value
    ]
    if other:
        reason = f"its folder holds another run ({', '.join(other)})"
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


def _own(folder: Path, *, shown: str) -> Run:
    """A run directory that `proxpo train` wrote."""
    notes: list[str] = []
    config = _config(folder / "config.yaml", shown, notes)
    summary = _object(folder / "summary.json", shown, notes)
    failure = _object(folder / "failure.json", shown, notes)
    logged: list[dict[str, Any]] = []
    if (folder / "metrics.jsonl").exists():
        logged, damage = read_lines(folder / "metrics.jsonl", shown=f"{shown}/metrics.jsonl")
        notes += damage
        notes += _history(logged, summary, shown)
    read = rows_of(logged, shown=f"{shown}/metrics.jsonl")
    status, reason = _status(config, summary, failure)
    name = one_line(str(config.get("method", folder.name)))
    return Run(
        name=name,
        method=name,
        seed=config.get("seed", seed_in(folder.name)),
        status=status,
        reason=one_line(reason),
        folder=one_line(shown),
        command=_command(folder, shown),
        config=config,
        rows=read.rows,
        broken=read.broken,
        summary={k: v for k, v in summary.items() if k not in ("config", "samples")},
        notes=tuple(map(one_line, (*notes, *read.notes))),
    )


def _command(folder: Path, shown: str) -> str:
    try:
        return one_line((folder / "command.txt").read_text(errors="replace"))
    except OSError:
        return one_line(f"proxpo train {shown}/config.yaml")


def _history(logged: list[dict[str, Any]], summary: Mapping[str, Any], shown: str) -> list[str]:
    """Steps without a row, and settings that changed when the run was resumed."""
    rows = [
        row for row in logged if type(row.get("step")) is int and 0 <= row["step"] <= MOST_STEPS
    ]
    gap = missing_steps(rows, max((row["step"] for row in rows), default=-1))
    notes = [f"{shown}/metrics.jsonl has no row of step {gap}"] if gap else []
    changes = summary.get("changes")
    for change in changes if isinstance(changes, list) else []:
        if isinstance(change, dict):
            setting, step, before, after = map(change.get, ("setting", "step", "before", "after"))
            notes.append(f"{shown}: {setting} changed after step {step}: {before} -> {after}")
    return notes


def _status(config: Mapping, summary: Mapping, failure: Mapping) -> tuple[str, str]:
    wanted = measured((config.get("train") or {}).get("steps")) or 0.0
    done = measured(summary.get("steps", wanted))
    if summary and done is not None and done >= wanted:
        return "done", ""
    if failure:
        step = measured(failure.get("step"))
        where = "" if step is None else f" (step {step:g})"
        words = [failure.get(key) for key in ("reason", "type")]
        reason = next((word for word in words if word and isinstance(word, str)), "no reason given")
        return "failed", f"{reason[:LONGEST]}{where}"
    if not summary or done is None:
        return "running", "has not finished"
    return "running", f"stopped after step {done:g} of {wanted:g}"


def _config(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    """The settings of a run; a part that has no such meaning is left out with a note."""
    try:
        config = read_tree(path) if path.exists() else {}
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


def _object(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        tree = parsed(path.read_bytes())
    except OSError:
        tree = None
    if isinstance(tree, dict):
        return tree
    notes.append(f"{shown}/{path.name} is damaged and left out")
    return {}


__all__ = ["Comparison", "Run", "read_comparison", "read_run"]
