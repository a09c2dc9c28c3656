"""Training runs read from files: one run, or all runs of a comparison.

Reading never fails for a damaged line or a missing end: what is there is read and what is not is
said in `notes`. A path that holds no run at all is refused.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxpo.compare.plan import Arm, Choice, PlannedRun, read_plan
from proxpo.errors import ProxpoError
from proxpo.train.sinks import missing_steps

MOST_STEPS = 10_000_000  # a step beyond is no step of a run
Row = Mapping[str, float]


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
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            found.append(row)
        elif number == len(lines):
            notes.append(f"{shown}: the last line is cut off; {len(found)} lines before it stand")
        else:
            notes.append(f"{shown}: line {number} is damaged and left out")
    return found, notes


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row; what is null, NaN or text was not measured."""
    return {
        name: float(value)
        for name, value in row.items()
        if type(value) in (int, float) and math.isfinite(value)
    }


def merge_steps(rows: Iterable[Mapping[str, float]]) -> tuple[Row, ...]:
    """One row a step in order of steps; what is logged again for a step replaces the earlier."""
    merged: dict[float, dict[str, float]] = {}
    for row in rows:
        if "step" in row:
            merged.setdefault(row["step"], {}).update(row)
    return tuple(merged[step] for step in sorted(merged))


def seed_in(text: str) -> int | None:
    """The seed that a name tells: `grpo-seed3`, `run_s3`, `seed=3`."""
    found = re.search(r"(?:^|[-_./= ])(?:seed|s)[-_= ]?(\d+)(?=$|[-_./ ])", text, re.IGNORECASE)
    return int(found[1]) if found else None


def _planned(folder: Path, planned: PlannedRun, method: str) -> Run:
    """A run of the plan; where nothing was written yet it waits."""
    path = folder / planned.folder
    run = _own(path, shown=planned.folder) if path.is_dir() else Run(name="", method=method)
    if not run.rows and run.status != "failed":
        run = replace(run, status="waiting", reason="")
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
    found: list[dict[str, Any]] = []
    if (folder / "metrics.jsonl").exists():
        found, damage = read_lines(folder / "metrics.jsonl", shown=f"{shown}/metrics.jsonl")
        notes += damage
        notes += _history(found, summary, shown)
    status, reason = _status(config, summary, failure)
    command = folder / "command.txt"
    return Run(
        name=str(config.get("method", folder.name)),
        method=str(config.get("method", folder.name)),
        seed=config.get("seed", seed_in(folder.name)),
        status=status,
        reason=reason,
        folder=shown,
        command=command.read_text(errors="replace").strip()
        if command.exists()
        else f"proxpo train {shown}/config.yaml",
        config=config,
        rows=merge_steps(map(numbers, found)),
        summary={k: v for k, v in summary.items() if k not in ("config", "samples")},
        notes=tuple(notes),
    )


def _history(found: list[dict[str, Any]], summary: Mapping[str, Any], shown: str) -> list[str]:
    """Steps without a row, and settings that changed when the run was resumed."""
    rows = [row for row in found if type(row.get("step")) is int and 0 <= row["step"] <= MOST_STEPS]
    gap = missing_steps(rows, max((row["step"] for row in rows), default=-1))
    notes = [f"{shown}/metrics.jsonl has no row of step {gap}"] if gap else []
    changes = summary.get("changes")
    changes = changes if isinstance(changes, list) else []
    for one in (one for one in changes if isinstance(one, dict)):
        values = f"{one.get('before')} -> {one.get('after')}"
        notes.append(
            f"{shown}: {one.get('setting')} changed after step {one.get('step')}: {values}"
        )
    return notes


def _status(config: Mapping, summary: Mapping, failure: Mapping) -> tuple[str, str]:
    wanted = (config.get("train") or {}).get("steps", 0)
    done = summary.get("steps", wanted)
    if summary and done >= wanted:
        return "done", ""
    if failure:
        where = f" (step {failure['step']})" if failure.get("step") is not None else ""
        return "failed", f"{failure.get('reason') or failure.get('type', 'no reason given')}{where}"
    return "running", f"stopped after step {done} of {wanted}" if summary else "has not finished"


def _config(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    from proxpo.train.config import read_yaml

    try:
        return read_yaml(path) if path.exists() else {}
    except ProxpoError as error:
        notes.append(str(error).replace(str(path), f"{shown}/{path.name}"))
        return {}


def _object(path: Path, shown: str, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    notes.append(f"{shown}/{path.name} is damaged and left out")
    return {}


__all__ = ["Comparison", "Run", "read_comparison", "read_run"]
