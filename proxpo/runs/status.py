"""Status of a run, from the two files that end one.

    summary.json   numbers of the finished run, written last of all its files
    failure.json   why the last attempt ended early: {reason, step, phase, type}

A run that was stopped or killed has neither: --resume continues it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from proxpo.runs.files import write_whole
from proxpo.runs.jsonlines import metric_value

SUMMARY, FAILURE = "summary.json", "failure.json"
Status = Literal["waiting", "running", "done", "failed"]


def status_of(
    summary: Mapping[str, Any] | None,
    failure: Mapping[str, Any] | None,
    *,
    steps: int | float,
    started: bool,
) -> Status:
    """Status of a run that is to make `steps` steps; None where a file is not there.

    Done: the summary counts at least `steps`. A failure before that was overcome.
    """
    made = None if summary is None else metric_value(summary.get("steps"))
    if made is not None and made >= steps:
        return "done"
    if failure is not None:
        return "failed"
    return "running" if started else "waiting"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json and deletes failure.json: the run has reached its end."""
    write_whole(folder / SUMMARY, json.dumps(summary, indent=1).encode())
    (folder / FAILURE).unlink(missing_ok=True)


def write_failure(folder: Path, *, reason: str, step: int, phase: str, kind: str) -> None:
    """Writes failure.json."""
    record = {"reason": reason, "step": step, "phase": phase, "type": kind}
    write_whole(folder / FAILURE, json.dumps(record, indent=1).encode())


def clear_end(folder: Path) -> None:
    """Deletes the previous attempt's summary and failure files."""
    for name in (SUMMARY, FAILURE):
        (folder / name).unlink(missing_ok=True)


__all__ = [
    "FAILURE", "SUMMARY", "Status", "clear_end", "status_of", "write_failure", "write_summary",
]  # fmt: skip
