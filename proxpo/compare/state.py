"""How far a run is, from its files alone, so that any process can tell."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proxpo.compare.plan import REWARD, SCORE
from proxpo.files import write_whole

SUMMARY, FAILURE, METRICS, LOG = "summary.json", "failure.json", "metrics.jsonl", "log.txt"
TAIL = 1 << 17  # bytes of metrics.jsonl that are looked at: some eighty steps
Status = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True, kw_only=True)
class State:
    """What a run has reached; score and KL are those of its last evaluation."""

    status: Status
    step: int = 0
    score: float | None = None
    kl: float | None = None
    reason: str = ""


def state_of(folder: Path, *, steps: int, score: str) -> State:
    """The state of the run in `folder`, which is to do `steps` steps."""
    rows = last_rows(folder / METRICS)
    step = int(rows[-1].get("step", 0)) if rows else 0
    at: dict[str, Any] = {
        "step": step,
        "score": _last(rows, score, *([REWARD] if score == SCORE else [])),
        "kl": _last(rows, "proxpo/eval/kl"),
    }
    summary = _read(folder / SUMMARY)
    if summary is not None and summary.get("steps", 0) >= steps:
        return State(status="done", **at)
    failure = _read(folder / FAILURE)
    if failure is not None:
        return State(status="failed", reason=str(failure.get("reason", "")), **at)
    return State(status="running" if rows else "waiting", **at)


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a file of JSON lines; one cut short is left out."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 :]
    except OSError:
        return []
    return [row for line in lines if (row := _parsed(line)) is not None]


def write_failure(folder: Path, reason: str, *, kind: str, step: int) -> None:
    """failure.json for a run that could not write its own."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"reason": reason, "step": step, "phase": "", "type": kind}
    write_whole(folder / FAILURE, json.dumps(tree, indent=1).encode())


def last_words(log: Path) -> str:
    """The last line a run wrote, which for one that was refused says why."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    spoken = [line.strip() for line in lines if line.strip()]
    return spoken[-1].removeprefix("proxpo: ") if spoken else ""


def _last(rows: list[dict[str, Any]], *names: str) -> float | None:
    """The latest value under the first of the names that the run has logged."""
    for name in names:
        for row in reversed(rows):
            if row.get(name) is not None:
                return row[name]
    return None


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


__all__ = ["FAILURE", "LOG", "State", "last_words", "state_of", "write_failure"]
