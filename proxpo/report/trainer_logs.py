"""Logs of other trainers: TRL's (transformers') trainer_state.json and verl's `file` logger."""

import re
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.report.run_data import Run, StepRows, read_log, rows_by_step, seed_in_name
from proxpo.report.text import one_line
from proxpo.runs.files import read_object
from proxpo.runs.jsonlines import metric_value

STATE = "trainer_state.json"
SETTINGS = ("max_steps", "train_batch_size")  # that TRL's state holds
EXPECTED = "expected a proxpo run folder, TRL's trainer_state.json or verl's .jsonl log"


def read_trainer_log(path: Path) -> Run:
    """The run in a log file, or in a folder that holds one."""
    if path.is_dir():
        return _trl(_state(path), named=path) if _has_state(path) else _verl(_log(path))
    if path.suffix == ".jsonl":
        return _verl(path)
    if path.suffix == ".json":
        return _trl(path, named=path.parent if path.name == STATE else path)
    raise ProxpoError(f"{path} is not a run: {EXPECTED}")


def _has_state(folder: Path) -> bool:
    return (folder / STATE).exists() or any(folder.glob(f"checkpoint-*/{STATE}"))


def _state(folder: Path) -> Path:
    """The folder's own state, else that of its newest checkpoint."""
    own = folder / STATE
    return own if own.exists() else max(folder.glob(f"checkpoint-*/{STATE}"), key=_number)


def _number(path: Path) -> int:
    number = re.search(r"\d+$", path.parent.name)
    return int(number[0]) if number else -1


def _trl(path: Path, *, named: Path) -> Run:
    """The run of a trainer_state.json, which logs training and evaluation of a step apart."""
    state = read_object(path) or {}
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ProxpoError(f"{path}: no log_history found; {EXPECTED}")
    folder = named.parent if re.fullmatch(r"checkpoint-\d+", named.name) else named
    read = rows_by_step(history, shown=str(path))
    known = {key: state[key] for key in SETTINGS if metric_value(state.get(key)) is not None}
    notes = [*_unfinished(state, path), *read.notes]
    return _run(folder, read, source="trl", notes=notes, config=known)


def _unfinished(state: dict[str, Any], path: Path) -> list[str]:
    done, wanted = (metric_value(state.get(key, 0)) for key in ("global_step", "max_steps"))
    if done is None or wanted is None or done >= wanted:
        return []
    return [f"{path}: ends at step {done:g} of {wanted:g}"]


def _log(folder: Path) -> Path:
    logs = sorted(folder.glob("*.jsonl"))
    if len(logs) != 1:
        problem = f"{len(logs)} .jsonl files, name one of them" if logs else f"no run; {EXPECTED}"
        raise ProxpoError(f"{folder}: {problem}")
    return logs[0]


def _verl(path: Path) -> Run:
    """The run of a log with lines of {"step": n, "data": {name: value}}."""
    lines, notes = read_log(path, shown=str(path))
    logged = [
        {**line["data"], "step": line.get("step")}
        for line in lines
        if isinstance(line.get("data"), dict)
    ]
    if not logged:
        raise ProxpoError(f"{path}: no metrics of a verl run found; {EXPECTED}")
    read = rows_by_step(logged, shown=str(path))
    notes += read.notes
    return _run(path.with_suffix(""), read, source="verl", shown=path, notes=notes)


def _run(
    path: Path,
    read: StepRows,
    *,
    source: str,
    notes: list[str],
    shown: Path | None = None,
    config: dict[str, Any] | None = None,
) -> Run:
    name = re.sub(r"[-_. =]?(?:seed|s)[-_= ]?\d+$", "", path.name, flags=re.IGNORECASE) or path.name
    return Run(
        name=one_line(name),
        method=one_line(name),
        seed=seed_in_name(path.name),
        folder=one_line(str(shown or path)),
        rows=read.rows,
        broken=read.broken,
        source=source,
        config=config or {},
        notes=tuple(map(one_line, notes)),
    )


__all__ = ["read_trainer_log"]
