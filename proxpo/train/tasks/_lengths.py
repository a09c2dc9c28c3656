"""Lengths of answers that tasks declare, in tokens, the end token included."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proxpo.train.tasks.own import own

REASONED = 512  # of an answer with its reasons, where nothing says more
STEP = 32
LOOKED_AT = 256  # solutions whose tokens are counted, those of the most characters
_counted: dict[tuple[Any, ...], int] = {}  # by options, model, and time of the file


def with_room(tokens: int) -> int:
    """A quarter more than a right answer takes, for wordier ones, in steps of 32."""
    return -(-5 * tokens // (4 * STEP)) * STEP


def longest_solution(
    options: Mapping[str, Any], tokenizer: Callable[[], Any], *, named: str
) -> int:
    """The longest answer of a file's problems, from their worked solutions; else `REASONED`."""
    path = Path(options["path"])
    if not (options["solution_field"] and path.is_file()):
        return REASONED
    text = json.dumps(options, sort_keys=True, default=str)
    key = (text, named, path.stat().st_mtime_ns)
    if key not in _counted:
        task, encode = own(**options), tokenizer().encode
        solutions = {problem.solution for split in (task.train, task.test) for problem in split}
        longest = sorted(solutions, key=len)[-LOOKED_AT:]
        most = max(len(encode(solution, add_special_tokens=False)) for solution in longest)
        _counted[key] = with_room(most + 1)
    return _counted[key]


__all__ = ["REASONED", "longest_solution", "with_room"]
