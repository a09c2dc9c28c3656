"""A calculator to call: sums in several turns, for methods that look at turns.

    prompt  17+26+35?
    turn 0  [17+26]      tool  =43      the tool's tokens are read by the model, never trained on
    turn 1  [43+35]      tool  =78
    turn 2  78           the answer: a turn without a call ends the episode

A turn that neither calls the calculator nor gives a number is void, and ends the episode too.
"""

import random
import re
from collections.abc import Sequence
from typing import Literal

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.rewards._types import RewardSpec
from proxpo.train.tasks._types import Lazy, Problem, Reply, Task
from proxpo.train.tasks.arithmetic import EXACT, TRAIN_SIZE

Level = Literal["default", "chain"]
LEVELS = {"default": 2, "chain": 3}  # operands
_CALL = re.compile(r"\[(\d{1,6})([+-])(\d{1,6})\]")
_NUMBER = re.compile(r"-?\d+")


def calculate(turn: str) -> Reply:
    """Reply of the calculator to a turn: `=43` to `[17+26]`, nothing to anything else."""
    call = _CALL.fullmatch(turn)
    if call is None:
        return Reply("", void=_NUMBER.fullmatch(turn) is None)
    a, sign, b = call.groups()
    return Reply(f"={int(a) + int(b) if sign == '+' else int(a) - int(b)}\n", void=False)


def solution(operands: Sequence[int]) -> list[str]:
    """The turns of an episode that calls once for each sign and then answers."""
    turns, total = [], operands[0]
    for term in operands[1:]:
        turns.append(f"[{total}+{term}]")
        total += term
    return [*turns, str(total)]


def calculator_turn(level: Level) -> int:
    """Tokens of the longest turn: the last call, of a running total, and the end token."""
    return max(map(len, solution([99] * LEVELS[level]))) + 1


def calculator(
    *,
    level: Level = "default",
    held_out: float = 0.1,
    test_size: int = 500,
    seed: int = 0,
) -> Task:
    """`17+26?` -> `[17+26]`, `=43`, `43`: two operands (three for "chain"), two digits each."""
    if not 0 < held_out < 1:
        raise ProxpoError(f"task calculator: held_out is a share between 0 and 1, got {held_out}")
    count = LEVELS[level]

    def operands(stream: int) -> tuple[int, ...]:
        draw = random.Random(stream)
        return tuple(draw.randint(10, 99) for _ in range(count))

    def is_held_out(terms: tuple[int, ...]) -> bool:
        return derive(0, "held out", *sorted(terms)) < held_out * 2**63

    def problem(terms: tuple[int, ...], number: int) -> Problem:
        return Problem("+".join(map(str, terms)) + "?", str(sum(terms)), number)

    def train(number: int) -> Problem:
        stream = (operands(derive(seed, "calculator", number, i)) for i in range(10_000))
        return problem(next(terms for terms in stream if not is_held_out(terms)), number)

    chosen: dict[tuple[int, ...], None] = {}
    for i in range(int(10 * test_size / held_out)):
        terms = operands(derive(seed, "calculator test", i))
        if is_held_out(terms):
            chosen[terms] = None
        if len(chosen) == test_size:
            break
    return Task(
        name="calculator" if level == "default" else f"calculator:{level}",
        train=Lazy(train, TRAIN_SIZE),
        test=[problem(terms, i) for i, terms in enumerate(chosen)],
        reward=RewardSpec(where=EXACT.where, trusted=True),
        tool=calculate,
        max_turns=count + 1,
    )


__all__ = ["LEVELS", "calculate", "calculator", "calculator_turn", "solution"]
