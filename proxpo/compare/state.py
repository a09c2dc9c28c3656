"""Progress of a run, read from its files alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxpo.compare.plan import REWARD, SCORE, Plan, PlannedRun
from proxpo.runs.files import read_object
from proxpo.runs.jsonlines import METRICS, metric_value, read_lines
from proxpo.runs.status import FAILURE, SUMMARY, Status, status_of

LOG = "log.txt"
TAIL = 1 << 17  # bytes of metrics.jsonl that are read: some eighty steps


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Status and step of a run; score and KL are those of its last evaluation."""

    status: Status
    step: int = 0
    score: float | None = None
    kl: float | None = None
    reason: str = ""


def state_of(folder: Path, *, steps: int, score: str) -> RunState:
    """The state of the run in `folder`, which is to make `steps` steps."""
    rows = _last_rows(folder / METRICS)
    failure = read_object(folder / FAILURE)
    status = status_of(read_object(folder / SUMMARY), failure, steps=steps, started=bool(rows))
    return RunState(
        status=status,
        step=int(_last(rows, "step") or 0),
        score=_last(rows, score, *([REWARD] if score == SCORE else [])),
        kl=_last(rows, "proxpo/eval/kl"),
        reason=str(failure.get("reason", "")) if failure and status == "failed" else "",
    )


def planned_state(plan: Plan, run: PlannedRun, folder: Path) -> RunState:
    """The state of one run of the plan."""
    return state_of(folder / run.folder, steps=run.steps, score=plan.score)


def last_line(log: Path) -> str:
    """The last line a run wrote, which gives the reason if the run was refused."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    written = [line.strip() for line in lines if line.strip()]
    return written[-1].removeprefix("proxpo: ") if written else ""


def _last_rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_lines(path, last_bytes=TAIL)
    except OSError:
        return []
    return [row for _, row in lines if row is not None]


def _last(rows: list[dict[str, Any]], *names: str) -> float | None:
    """The latest measured value under the first of the names that the run has logged."""
    values = (metric_value(row.get(name)) for name in names for row in reversed(rows))
    return next((value for value in values if value is not None), None)


__all__ = ["LOG", "RunState", "last_line", "planned_state", "state_of"]
