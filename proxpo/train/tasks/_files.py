"""JSON-lines files of problems: read with line numbers in errors, split by hash."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.train.tasks._identity import question


def read_jsonl(path: Path, *, needed: Mapping[str, type] | None = None) -> list[dict[str, Any]]:
    """The objects of the file; blank lines are passed over, an empty file is refused."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
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
    """Train and test rows: equal questions fall on the same side, whatever the file's order.

    Of several spellings of a question the first in the alphabet decides for all of them.
    """
    asked = [_question(row[key]) for row in rows]
    spelling: dict[str, str] = {}
    for row, text in zip(rows, asked):
        written = json.dumps(row[key], sort_keys=True)
        spelling[text] = min(written, spelling.get(text, written))
    draw = {text: derive(0, "held out", written) for text, written in spelling.items()}
    if len(draw) == 1:  # nothing to keep apart: the run says that it is tested on its training data
        return rows[:-1] or rows, rows[-1:]
    held_out = {text for text in draw if draw[text] < share * 2**63}
    if len(held_out) in (0, len(draw)):  # too few questions to split by chance
        held_out = {min(draw, key=lambda text: draw[text])}
    return (
        [row for row, text in zip(rows, asked) if text not in held_out],
        [row for row, text in zip(rows, asked) if text in held_out],
    )


def _question(prompt: Any) -> str:
    """The question of a prompt; one that is neither text nor messages is refused later."""
    try:
        return question(prompt)
    except (TypeError, KeyError, AttributeError):
        return json.dumps(prompt, sort_keys=True)


__all__ = ["read_jsonl", "split_by_hash"]
