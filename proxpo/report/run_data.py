"""Training runs as reports need them: rows of metrics by step, settings, status.

Reading never fails for a damaged line: it is left out, with a sentence in `notes`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.compare.plan import Arm, Choice, Finding
from proxpo.report.text import one_line, plural
from proxpo.runs.jsonlines import metric_value, read_lines

Row = Mapping[str, float]
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
    files: Mapping[str, Any] = field(default_factory=dict)  # fingerprints of local files, by path
    rows: tuple[Row, ...] = ()  # one per step; a metric that was not measured is absent
    # the first step at which a metric was logged as NaN, infinity, text or beyond float32
    broken: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    source: str = "proxpo"  # "proxpo" | "trl" | "verl"
    notes: tuple[str, ...] = ()  # what could not be read

    @property
    def counts(self) -> bool:
        """True if it is done and not a tuning run: means and intervals are over these."""
        return self.status == "done" and self.role != "tune"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that answer one question. `score` names the metric that ranks, "" leaves the choice."""

    folder: Path
    title: str
    question: str = ""
    arms: tuple[Arm, ...] = ()
    runs: tuple[Run, ...] = ()
    chosen: tuple[Choice, ...] = ()
    confirms: tuple[Finding, ...] = ()
    score: str = ""
    notes: tuple[str, ...] = ()


def read_log(path: Path, *, shown: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON objects of a log, line by line, and a sentence for each line that is damaged."""
    try:
        lines = read_lines(path)
    except OSError as error:
        return [], [f"{shown} cannot be read: {(error.strerror or str(error)).lower()}"]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, (line, row) in enumerate(lines, 1):
        if row is not None:
            rows.append(row)
        elif line.strip() and number == len(lines):
            notes.append(f"{shown}: the last line is cut off; {len(rows)} lines before it stand")
        elif line.strip():
            notes.append(f"{shown}: line {number} is damaged and left out")
    if len(notes) > MOST_NOTES:
        more = len(notes) - MOST_NOTES + 1
        notes = [*notes[: MOST_NOTES - 1], f"{shown}: {more} more lines are damaged and left out"]
    return rows, notes


class StepRows(NamedTuple):
    """Rows of a log in order of steps, the broken metrics, and a note on rows that are left out."""

    rows: tuple[Row, ...]
    broken: dict[str, float]
    notes: list[str]


def rows_by_step(logged: Iterable[Mapping[str, Any]], *, shown: str) -> StepRows:
    """One row a step; a value that is logged again for a step replaces the earlier.

    A null was not measured. A step is a whole number from 0 on; a row without one is left out.
    """
    merged: dict[float, dict[str, float]] = {}
    broken: dict[str, float] = {}
    lost = 0
    for row in logged:
        step = metric_value(row.get("step"))
        if step is None or not 0 <= step <= LAST_STEP or step != int(step):
            lost += 1
            continue
        values = merged.setdefault(step, {})
        for key, value in row.items():
            name = key if key.isprintable() else one_line(key)
            number = metric_value(value)
            if number is not None:
                values[name] = number
            elif value is not None:
                values.pop(name, None)
                broken[name] = min(step, broken.get(name, step))
    notes = [f"{shown}: {plural(lost, 'row')} without a step from 0 on left out"] if lost else []
    return StepRows(tuple(merged[step] for step in sorted(merged)), broken, notes)


def seed_in_name(text: str) -> int | None:
    """The seed in a name such as `grpo-seed3`, `run_s3` or `seed=3`."""
    seed = re.search(r"(?:^|[-_./= ])(?:seed|s)[-_= ]?(\d+)(?=$|[-_./ ])", text, re.IGNORECASE)
    return int(seed[1]) if seed and len(seed[1]) < 19 else None


__all__ = ["Comparison", "Run", "StepRows", "read_log", "rows_by_step", "seed_in_name"]
