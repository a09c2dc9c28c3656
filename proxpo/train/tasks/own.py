"""Your own problems: a JSON-lines file, and a reward function in TRL's or verl's signature.

{"prompt": "...", "answer": "...", ...}      TRL: a text or chat prompt, further columns
{"question": "...", "answer": "..."}
{"data_source": "...", "prompt": [...], "reward_model": {"ground_truth": ...}, ...}      verl
"""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, nearest
from proxpo.rewards._types import RewardSpec
from proxpo.rewards.answers import answer_of
from proxpo.train.tasks._files import read_jsonl, split_by_hash
from proxpo.train.tasks._types import Problem, Task, with_system

BUILT_IN = {
    "exact": "proxpo.rewards.answers:exact",
    "final-answer": "proxpo.rewards.answers:final_answer",
}
PROMPTS = ("prompt", "question", "problem")


def own(
    *,
    path: str,
    reward: str | None = None,
    reward_kwargs: dict | None = None,
    test: str | None = None,
    held_out: float = 0.1,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    solution_field: str | None = None,
    system: str = "",
    template: dict | None = None,
) -> Task:
    """Problems of a file. Without `test`, a share of them is held out by the hash of the prompt.

    reward: "file.py:function", "package.module:function", or a built-in one, "exact" (the whole
    response) or "final-answer" (a number after `####` or in a box). solution_field: worked
    solutions, for `proxpo warmup` and the length of answers. system: a system prompt before each
    prompt.
    """
    if not 0 < held_out < 1:
        raise ProxpoError(f"task {path}: held_out is a share between 0 and 1, got {held_out}")
    _refuse_other_sources(path)
    rows = read_jsonl(Path(path))
    key = _field(rows[0], path, prompt_field, PROMPTS, "prompt_field")
    if test is None:
        _complete(rows, path, key)
        train_rows, test_rows = split_by_hash(rows, share=held_out, key=key)
    else:
        train_rows, test_rows = rows, read_jsonl(Path(test))
    made = {
        name: [
            _problem(
                row, i, f"{path}, {name} problem {i}", key, answer_field, solution_field, system
            )
            for i, row in rows_
        ]
        for name, rows_ in (("train", enumerate(train_rows)), ("test", enumerate(test_rows)))
    }
    if reward in BUILT_IN:
        _refuse_unanswered(made, path, reward)
    return Task(
        name=path,
        train=made["train"],
        test=made["test"],
        reward=reward_spec(reward, reward_kwargs or {}, path),
        template=template or {},
    )


def _refuse_other_sources(path: str) -> None:
    """Refuses a table or a dataset of the hub with the line that makes JSON lines of it."""
    kind = Path(path).suffix[1:].lower()
    if kind in ("csv", "parquet"):
        source = f'"{kind}", data_files="{path}"'
    elif re.fullmatch(r"[\w-]+/[\w-]+", path) and not Path(path).exists():
        source = f'"{path}"'
    else:
        return
    raise ProxpoError(
        f"task {path}: not a file of JSON lines (.jsonl), one problem a line; the package datasets "
        f'writes one: load_dataset({source}, split="train").to_json("problems.jsonl")'
    )


def _refuse_unanswered(made: dict[str, list[Problem]], path: str, reward: str) -> None:
    """Refuses a problem without an answer, which would count as wrong whatever the response."""
    for name, problems in made.items():
        for problem in problems:
            if problem.answer is None:
                raise ProxpoError(
                    f"{path}, {name} problem {problem.index}: reward={reward} needs an answer, and "
                    "it has none (task.options.answer_field names the field)"
                )


def reward_spec(where: str | None, kwargs: dict[str, Any], task: str) -> RewardSpec:
    """The function's full name, checked as far as that goes without running it."""
    if where is None:
        raise ProxpoError(
            f"task {task} needs a reward: --set task.reward=FILE.py:FUNCTION, or "
            f"{' or '.join(BUILT_IN)}"
        )
    source = Path(task).stem
    if where in BUILT_IN:
        return RewardSpec(where=BUILT_IN[where], kwargs=kwargs, source=source, trusted=True)
    place, colon, name = where.rpartition(":")
    if not colon or not name.isidentifier():
        raise ProxpoError(
            f"reward '{where}' should read FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, or be "
            f"{' or '.join(BUILT_IN)}"
        )
    if not place.endswith(".py"):
        _check_module(place)
        return RewardSpec(where=where, kwargs=kwargs, source=source)
    path = Path(place).resolve()
    _check_source(path, name)
    return RewardSpec(where=f"{path}:{name}", kwargs=kwargs, source=source)


def _check_source(path: Path, name: str) -> None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ProxpoError(f"reward file {path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise ProxpoError(f"reward file {path}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ProxpoError(f"reward file {path} is not Python source: {error}") from None
    functions = [
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    other = {
        bound
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for bound in _bound(node)
    }
    if name not in functions and name not in other and "*" not in other:
        raise ProxpoError(f"reward file {path} has no function '{name}'{nearest(name, functions)}")


def _bound(node: ast.stmt) -> set[str]:
    """Names a statement at the top of a module may bind: imports, assignments, blocks of them."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    names |= {
        inner.asname or inner.name for inner in ast.walk(node) if isinstance(inner, ast.alias)
    }
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return names | {inner.name for inner in ast.walk(node) if isinstance(inner, defined)}


def _check_module(module: str) -> None:
    try:
        installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        installed = False
    if not installed:
        raise ProxpoError(f"reward module '{module}' is not installed or not on the Python path")


def _field(
    row: dict[str, Any], path: str, named: str | None, usual: tuple[str, ...], option: str
) -> str:
    names = (named,) if named else usual
    for name in names:
        if name in row:
            return name
    raise ProxpoError(
        f"{path}:1: no field {' or '.join(names)}, it has {', '.join(row)}; name it with {option}"
    )


def _complete(rows: list[dict[str, Any]], path: str, key: str) -> None:
    for number, row in enumerate(rows):
        if key not in row:
            raise ProxpoError(f"{path}, problem {number}: the field '{key}' is missing")


def _problem(
    row: dict[str, Any],
    index: int,
    place: str,
    key: str,
    answer_field: str | None,
    solution_field: str | None,
    system: str,
) -> Problem:
    prompt: Any = row.get(key)
    if not _is_prompt(prompt):
        raise ProxpoError(
            f"{place}: '{key}' should be text or a list of messages with role and content, not "
            "empty"
        )
    if system and not isinstance(prompt, str) and prompt[0]["role"] == "system":
        raise ProxpoError(f"{place} has a system prompt of its own: leave task.options.system out")
    answer = answer_of(row, answer_field)
    for named in (answer_field, solution_field):
        if named and named not in row:
            raise ProxpoError(f"{place}: the field '{named}' is missing")
    rest = {name: value for name, value in row.items() if name != key}
    extra = rest | dict(row.get("extra_info") or {})
    solution = str(row[solution_field]) if solution_field else ""
    return Problem(with_system(prompt, system), answer, index, extra, solution=solution)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    )


__all__ = ["BUILT_IN", "own", "reward_spec"]
