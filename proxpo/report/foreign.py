"""Runs made elsewhere: TRL's (transformers') trainer_state.json and verl's `file` logger."""

import json
import re
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.report.runs import Run, merge_steps, numbers, read_lines, seed_in

STATE = "trainer_state.json"
EXPECTED = "expected a proxpo run folder, TRL's trainer_state.json or verl's .jsonl log"


def read(path: Path) -> Run:
    """The run of a file, or of a folder that holds one."""
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
    found = re.search(r"\d+$", path.parent.name)
    return int(found[0]) if found else -1


def _trl(path: Path, *, named: Path) -> Run:
    """transformers logs training and evaluation of one step apart: they become one row."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        rows = merge_steps(numbers(row) for row in state["log_history"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ProxpoError(f"{path}: no log_history found; {EXPECTED}") from None
    folder = named.parent if re.fullmatch(r"checkpoint-\d+", named.name) else named
    return _run(folder, rows, source="trl", notes=_unfinished(state, path))


def _unfinished(state: dict[str, Any], path: Path) -> list[str]:
    done, wanted = state.get("global_step", 0), state.get("max_steps", 0)
    return [f"{path}: ends at step {done} of {wanted}"] if done < wanted else []


def _log(folder: Path) -> Path:
    found = sorted(folder.glob("*.jsonl"))
    if len(found) != 1:
        many = f"{len(found)} .jsonl files, name one of them" if found else f"no run; {EXPECTED}"
        raise ProxpoError(f"{folder}: {many}")
    return found[0]


def _verl(path: Path) -> Run:
    """Lines of {"step": n, "data": {name: value}}."""
    lines, notes = read_lines(path, shown=str(path))
    rows = [
        {**numbers(line["data"]), **numbers({"step": line.get("step")})}
        for line in lines
        if isinstance(line.get("data"), dict)
    ]
    if not rows:
        raise ProxpoError(f"{path}: no metrics of a verl run found; {EXPECTED}")
    return _run(path.with_suffix(""), merge_steps(rows), source="verl", shown=path, notes=notes)


def _run(
    path: Path, rows: tuple, *, source: str, notes: list[str], shown: Path | None = None
) -> Run:
    name = re.sub(r"[-_. =]?(?:seed|s)[-_= ]?\d+$", "", path.name, flags=re.IGNORECASE) or path.name
    return Run(
        name=name,
        method=name,
        seed=seed_in(path.name),
        folder=str(shown or path),
        rows=rows,
        source=source,
        notes=tuple(notes),
    )


__all__ = ["read"]
