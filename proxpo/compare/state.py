"""How far a run is, from its files alone, so that any process can tell."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proxpo.compare.plan import REWARD, SCORE
from proxpo.runs.files import write_whole

SUMMARY, FAILURE, METRICS, LOG = "summary.json", "failure.json", "metrics.jsonl", "log.txt"
TAIL = 1 << 17  # bytes of metrics.jsonl that are looked at: some eighty steps
LARGEST = 3.4028234663852886e38  # float32's: no metric of a training run is larger
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
    at: dict[str, Any] = {
        "step": int(_last(rows, "step") or 0),
        "score": _last(rows, score, *([REWARD] if score == SCORE else [])),
        "kl": _last(rows, "proxpo/eval/kl"),
    }
    summary = _read(folder / SUMMARY)
    if summary is not None and (measured(summary.get("steps")) or 0) >= steps:
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
    return [row for line in lines if isinstance(row := parsed(line), dict)]


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


def measured(value: Any) -> float | None:
    """A finite number that a run can have measured, at most float32's largest; else None."""
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def parsed(data: bytes | str) -> Any:
    """The value of a JSON text, None where it is damaged or nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _last(rows: list[dict[str, Any]], *names: str) -> float | None:
    """The latest measured value under the first of the names that the run has logged."""
    values = (measured(row.get(name)) for name in names for row in reversed(rows))
    return next((value for value in values if value is not None), None)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        tree = parsed(path.read_bytes())
    except OSError:
        return None
    return tree if isinstance(tree, dict) else None


__all__ = [
    "FAILURE",
    "LOG",
    "State",
    "last_words",
    "measured",
    "parsed",
    "state_of",
    "write_failure",
]
