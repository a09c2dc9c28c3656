"""Files of JSON lines, one row each: metrics.jsonl, samples.jsonl, logs of other trainers.

A kill may leave the last line half-written; readers leave out what is not a JSON object.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.files import parse_json, write_whole
from proxpo.runs.page import json_ready

METRICS = "metrics.jsonl"
CUT_TOKENS = "proxpo/micro_batch_tokens"  # the most of a micro-batch that memory cut
LARGEST_METRIC = 3.4028234663852886e38  # float32's: no metric of a training run is larger
OnNotice = Callable[[str], None]


class JsonLines:
    """Writes one flushed line of JSON per row; on resuming, rows after `resume_at` are cut off.

    each_step: there is one row for every step from 0 on, so a gap is worth a notice.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_at: int | None = None,
        each_step: bool = False,
        on_notice: OnNotice = lambda line: None,
    ) -> None:
        self.path = Path(path)
        with self._clear_errors():
            kept = _kept(self.path, -1 if resume_at is None else resume_at, each_step, on_notice)
            write_whole(self.path, kept)
            # Unbuffered: a line that could not be written must not be tried again on closing.
            self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step."""
        self.append({"step": step} | {name: as_number(value) for name, value in metrics.items()})

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes any row; NaN and infinities become null, other values JSON does not know text."""
        line = json.dumps(json_ready(row), default=str, allow_nan=False).encode() + b"\n"
        with self._clear_errors():
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ProxpoError(f"{self.path} cannot be written: {error.strerror}") from error


def read_lines(
    path: Path, *, last_bytes: int | None = None
) -> list[tuple[bytes, dict[str, Any] | None]]:
    """(line, its JSON object) in order; None for a line that is damaged or no object.

    last_bytes: only the whole lines within the last so many bytes.
    """
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    return [(line, row if isinstance(row := parse_json(line), dict) else None) for line in lines]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines that belong to a step."""
    return [row for _, row in read_lines(path) if row is not None and _has_step(row)]


def as_number(value: Any) -> int | float | None:
    """A plain number; None (null in JSON) for NaN and infinities, which JSON does not have."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a metric is a number, got {type(value).__name__}")
    return value if math.isfinite(value) else None


def metric_value(value: Any) -> float | None:
    """A finite number that a run can have measured, at most float32's largest; else None."""
    if type(value) not in (int, float) or not -LARGEST_METRIC <= value <= LARGEST_METRIC:
        return None
    return float(value)


def missing_steps(rows: Iterable[Mapping[str, Any]], last: int) -> str:
    """The steps from 0 to `last` without a row, as `2-4, 7`; empty where all are there."""
    present = {row["step"] for row in rows}
    missing = [step for step in range(last + 1) if step not in present]
    starts = [step for step in missing if step - 1 in present or step == 0]
    ends = [step for step in missing if step + 1 in present or step == last]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def _kept(path: Path, resume_at: int, each_step: bool, on_notice: OnNotice) -> bytes:
    """The whole lines up to and including step `resume_at`; a notice for each kind of loss.

    A last line that a kill cut off is no loss: its step comes again.
    """
    if resume_at < 0:
        return b""
    if not path.exists():
        on_notice(f"{path} is missing: the new one begins after step {resume_at}")
        return b""
    lines = [(line, row if row and _has_step(row) else None) for line, row in read_lines(path)]
    damaged = sum(row is None for _, row in lines[:-1])
    if damaged:
        on_notice(f"{path}: {damaged} damaged line{'s' * (damaged > 1)} left out")
    kept = [(line, row) for line, row in lines if row is not None and row["step"] <= resume_at]
    if each_step:
        kept = _one_row_per_step(kept, path, on_notice)
        if gap := missing_steps((row for _, row in kept), resume_at):
            on_notice(
                f"{path} has no row of step {gap}: these numbers are lost, reports show the gap"
            )
    return b"".join(line + b"\n" for line, _ in kept)


def _one_row_per_step(
    lines: list[tuple[bytes, dict[str, Any]]], path: Path, on_notice: OnNotice
) -> list[tuple[bytes, dict[str, Any]]]:
    """The last row of every step, in order of steps."""
    latest = {row["step"]: (line, row) for line, row in lines}
    ordered = [latest[step] for step in sorted(latest)]
    if [row["step"] for _, row in ordered] != [row["step"] for _, row in lines]:
        on_notice(f"{path}: steps stood twice or out of order; the last row of each step is kept")
    return ordered


def _has_step(row: Mapping[str, Any]) -> bool:
    return type(row.get("step")) is int and row["step"] >= 0


__all__ = [
    "CUT_TOKENS",
    "METRICS",
    "JsonLines",
    "as_number",
    "metric_value",
    "missing_steps",
    "read_lines",
    "read_rows",
]
