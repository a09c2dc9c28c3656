"""JSON-lines files of problems: read with the line number in every complaint, split by hash."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.train.streams import derive


def read_jsonl(path: Path, *, needed: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """The objects of the file; blank lines are passed over, an empty file is refused."""
    try:
        with path.open(encoding="utf-8") as lines:
            rows = [
                _row(line, f"{path}:{number}", needed or {})
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
    except OSError as error:
        raise ProxpoError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ProxpoError(f"{path} is not UTF-8 text: {error.reason}") from None
    if not rows:
        raise ProxpoError(f"{path} is empty: expected one JSON object per line")
    return rows


def _row(line: str, place: str, needed: Mapping[str, type]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ProxpoError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ProxpoError(f"{place}: expected a JSON object, got {type(row).__name__}")
    for key, kind in needed.items():
        if key not in row:
            raise ProxpoError(f"{place}: the field '{key}' is missing; it has {', '.join(row)}")
        if not isinstance(row[key], kind):
            raise ProxpoError(
                f"{place}: '{key}' is {type(row[key]).__name__}, expected {kind.__name__}"
            )
    return row


def split_by_hash(
    rows: list[dict[str, Any]], *, share: float, key: str
) -> tuple[list[dict], list[dict]]:
    """Train and test rows: equal prompts fall on the same side, whatever the file's order."""

    def held_out(row: dict[str, Any]) -> bool:
        return derive(0, "held out", json.dumps(row[key], sort_keys=True)) < share * 2**63

    train = [row for row in rows if not held_out(row)]
    test = [row for row in rows if held_out(row)]
    # Too few rows to split by chance: the last one stands in, so that there is something to test.
    return (train, test) if train and test else (rows[:-1] or rows, rows[-1:])


__all__ = ["read_jsonl", "split_by_hash"]
