"""Tasks by name: `arithmetic`, `arms`, `calculator`, `column-sums`, `dialogue`, `gsm8k`,
`reasoning-gym:<name>`, `textarena:<game>`, `verifiers:<taskset>`, or your own file.

make_task("arithmetic:hard")
make_task("gsm8k:FOLDER", verifier="numeric")
make_task("problems.jsonl", reward="reward.py:score")
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from proxpo.errors import ProxpoError, fold, resolve
from proxpo.stages._options import bind
from proxpo.train.domains import DOMAINS
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
from proxpo.train.tasks.arithmetic import CHAT_LEVELS, TEXT_LEVELS, arithmetic, arithmetic_chat
from proxpo.train.tasks.arms import arms
from proxpo.train.tasks.calculator import LEVELS as CALCULATOR_LEVELS
from proxpo.train.tasks.calculator import calculator
from proxpo.train.tasks.column_sums import LEVELS as COLUMN_LEVELS
from proxpo.train.tasks.column_sums import column_sums
from proxpo.train.tasks.dialogue import dialogue
from proxpo.train.tasks.gsm8k import gsm8k
from proxpo.train.tasks.own import own, reward_spec
from proxpo.train.tasks.reasoning_gym import reasoning_gym
from proxpo.train.tasks.textarena import textarena
from proxpo.train.tasks.verifiers import verifiers

# What follows the colon in a task's name is this option of its factory.
TASKS: dict[str, tuple[Callable[..., Task], str]] = {
    "arithmetic": (arithmetic, "level"),
    "arithmetic-chat": (arithmetic_chat, "level"),
    "arms": (arms, "count"),
    "calculator": (calculator, "level"),
    "column-sums": (column_sums, "level"),
    "dialogue": (dialogue, "parts"),
    "gsm8k": (gsm8k, "path"),
    "reasoning-gym": (reasoning_gym, "name"),
    "textarena": (textarena, "name"),
    "verifiers": (verifiers, "name"),
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


def _make(name: str, reward: str | None, options: dict[str, Any]) -> Task:
    if re.search(r"\.(jsonl?|csv|parquet)$|[/\\]", name.split(":")[0]):
        return own(**bind(own, {"path": name, "reward": reward, **options}, what=f"task {name}"))
    head, colon, rest = name.partition(":")
    known = [*TASKS, *(prefix for domain in DOMAINS for prefix in domain.prefixes)]
    head = resolve(head, known, what="task")
    if head not in TASKS:
        raise ProxpoError(f"task {name} is none of language models")
    factory, option = TASKS[head]
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
    task = factory(**bind(factory, options, what=f"task {head}"))
    return task if reward is None else replace(task, reward=reward_spec(reward, {}, name))


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
    "make_task",
    "take_pool",
]
