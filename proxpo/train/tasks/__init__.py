"""Tasks by name: `arithmetic`, `arms`, `calculator`, `column-sums`, `dialogue`, `gsm8k`,
`reasoning-gym:<name>`, `textarena:<game>`, `verifiers:<taskset>`, or your own file.

make_task("arithmetic:hard")
make_task("gsm8k:FOLDER", verifier="numeric")
make_task("problems.jsonl", reward="reward.py:score")
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from proxpo.errors import ProxpoError, fold, resolve
from proxpo.stages._options import bind
from proxpo.train.domains import DOMAINS
from proxpo.train.tasks._lengths import REASONED, longest_solution
from proxpo.train.tasks._types import (
    Effect,
    Environment,
    Lazy,
    Problem,
    Reply,
    Situation,
    Task,
    fit_prompts,
    take_pool,
)
from proxpo.train.tasks.arithmetic import (
    CHAT_LEVELS,
    TEXT_LEVELS,
    arithmetic,
    arithmetic_answer,
    arithmetic_chat,
    chat_answer,
)
from proxpo.train.tasks.arms import arms
from proxpo.train.tasks.calculator import LEVELS as CALCULATOR_LEVELS
from proxpo.train.tasks.calculator import calculator, calculator_turn
from proxpo.train.tasks.column_sums import LEVELS as COLUMN_LEVELS
from proxpo.train.tasks.column_sums import column_answer, column_sums
from proxpo.train.tasks.dialogue import dialogue
from proxpo.train.tasks.gsm8k import gsm8k
from proxpo.train.tasks.own import own, reward_spec
from proxpo.train.tasks.reasoning_gym import reasoning_gym
from proxpo.train.tasks.textarena import textarena
from proxpo.train.tasks.verifiers import verifiers


class TaskEntry(NamedTuple):
    """A task by name.

    option: of the factory, which may follow the colon in the task's name
    longest: tokens of the longest answer, the end token included: a number, or a function that
        takes those of the factory's options that decide it
    """

    factory: Callable[..., Task]
    option: str
    longest: int | Callable[..., int]


TASKS: dict[str, TaskEntry] = {
    "arithmetic": TaskEntry(arithmetic, "level", arithmetic_answer),
    "arithmetic-chat": TaskEntry(arithmetic_chat, "level", chat_answer),
    "arms": TaskEntry(arms, "count", 1),
    "calculator": TaskEntry(calculator, "level", calculator_turn),
    "column-sums": TaskEntry(column_sums, "level", column_answer),
    "dialogue": TaskEntry(dialogue, "parts", 1),
    "gsm8k": TaskEntry(gsm8k, "path", REASONED),
    "reasoning-gym": TaskEntry(reasoning_gym, "name", REASONED),
    "textarena": TaskEntry(textarena, "name", REASONED),
    "verifiers": TaskEntry(verifiers, "name", REASONED),
}
NUMBERS = ("count", "parts")  # options after the colon that are numbers
GENERATED = (
    "arithmetic",
    "arithmetic-chat",
    "arms",
    "calculator",
    "column-sums",
    "dialogue",
    "reasoning-gym",
    "textarena",
)  # without an end
LEVELS: dict[str, dict] = {
    "arithmetic": TEXT_LEVELS,
    "arithmetic-chat": CHAT_LEVELS,
    "calculator": CALCULATOR_LEVELS,
    "column-sums": COLUMN_LEVELS,
}


def make_task(
    name: str, *, reward: str | None = None, correct_above: float | None = None, **options: Any
) -> Task:
    """The task called `name`, its options checked; `reward` replaces the task's own.

    correct_above: a response is right where its reward is above this number, whatever the reward
    function says of it
    """
    task = _make(name, reward, options)
    if correct_above is None:
        return task
    return replace(task, reward=replace(task.reward, correct_above=correct_above))


def longest_answer(
    name: str, options: Mapping[str, Any], *, tokenizer: Callable[[], Any], named: str
) -> int:
    """Tokens of the longest answer that the task called `name` declares.

    That of a file follows from its worked solutions, where it has some, in the tokens of the
    `tokenizer` of the model `named` so. Of a task that cannot be made it is `REASONED`: making it
    says why.
    """
    reward, rest = options.get("reward"), {k: v for k, v in options.items() if k != "reward"}
    try:
        if _is_file(name):
            bound = bind(own, {"path": name, "reward": reward, **rest}, what=f"task {name}")
            return longest_solution(bound, tokenizer, named=named)
        entry, bound = _chosen(name, rest)
    except ProxpoError:
        return REASONED
    if isinstance(entry.longest, int):
        return entry.longest
    wanted = inspect.signature(entry.longest).parameters
    return entry.longest(**{key: value for key, value in bound.items() if key in wanted})


def _is_file(name: str) -> bool:
    return bool(re.search(r"\.(jsonl?|csv|parquet)$|[/\\]", name.split(":")[0]))


def _make(name: str, reward: str | None, options: dict[str, Any]) -> Task:
    if _is_file(name):
        return own(**bind(own, {"path": name, "reward": reward, **options}, what=f"task {name}"))
    entry, bound = _chosen(name, options)
    task = entry.factory(**bound)
    return task if reward is None else replace(task, reward=reward_spec(reward, {}, name))


def _chosen(name: str, options: dict[str, Any]) -> tuple[TaskEntry, dict[str, Any]]:
    """The task called `name` and the options of its factory, checked."""
    head, colon, rest = name.partition(":")
    known = [*TASKS, *(prefix for domain in DOMAINS for prefix in domain.prefixes)]
    head = resolve(head, known, what="task")
    if head not in TASKS:
        raise ProxpoError(f"task {name} is none of language models")
    entry, option = TASKS[head], TASKS[head].option
    given = [options[option]] if option in options else []
    given += [int(rest) if option in NUMBERS and rest.isdecimal() else rest] if colon else []
    if given and head in LEVELS:
        given = [resolve(str(level), LEVELS[head], what=f"level of {head}") for level in given]
    if given and given[0] != given[-1]:
        raise ProxpoError(f"task {name} and task.options.{option}={given[0]} contradict each other")
    if given:
        options = {**options, option: given[0]}
    elif option == "name" and "name" not in options:
        raise ProxpoError(f"task {head} needs a name: {head}:NAME")
    return entry, bind(entry.factory, options, what=f"task {head}")


def is_generated(name: str) -> bool:
    """True if the task called `name` generates its problems, so that hardly any comes again."""
    return fold(name.partition(":")[0]) in map(fold, GENERATED)


__all__ = [
    "TASKS",
    "Effect",
    "Environment",
    "Lazy",
    "Problem",
    "Reply",
    "Situation",
    "Task",
    "fit_prompts",
    "is_generated",
    "longest_answer",
    "make_task",
    "take_pool",
]
