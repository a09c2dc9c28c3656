"""Arithmetic, generated: sums and differences as bare text ("123+456=") or as a chat question.

A problem is held out for testing when the hash of its operands says so, `a+b` and `b+a` together,
so no test problem is ever trained on, in any run. Nothing is read from or written to disk.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.rewards._types import Messages, RewardSpec
from proxpo.train.tasks._types import Lazy, Problem, Task

TRAIN_SIZE = 1 << 20
TEXT_LEVELS: dict[str, dict] = {
    "easy": {"digits": (1, 2), "operations": "+"},
    "default": {"digits": (3, 3), "operations": "+"},
    "hard": {"digits": (3, 3), "operations": "+-"},
    "expert": {"digits": (4, 4), "operations": "+-"},
    "mixed": {"digits": (1, 4), "operations": "+-"},
}
CHAT_LEVELS: dict[str, dict] = {
    "easy": {"low": 1, "high": 9},
    "default": {"low": 10, "high": 49},
    "hard": {"low": 100, "high": 999},
}
EXACT = RewardSpec(where="proxpo.rewards.answers:exact", trusted=True)
LAST_NUMBER = RewardSpec(
    where="proxpo.rewards.answers:final_answer", kwargs={"strict": False}, trusted=True
)


class Sum(NamedTuple):
    """`a` and `b` under `+` or `-`; differences are never negative."""

    a: int
    operation: str
    b: int

    @property
    def result(self) -> int:
        return self.a + self.b if self.operation == "+" else self.a - self.b

    def text(self) -> str:
        return f"{self.a}{self.operation}{self.b}="

    def chat(self) -> Messages:
        asked = f"What is {self.a} {self.operation} {self.b}? Answer with the number only."
        return [{"role": "user", "content": asked}]


def held_out(x: Sum, share: float) -> bool:
    """True if the problem belongs to the test split: a fixed share of all operand pairs."""
    low, high = sorted((x.a, x.b))
    return derive(0, "held out", low, x.operation, high) < share * 2**63


@dataclass(frozen=True)
class Generated:
    """Problems of one kind, each drawn from its own stream, in two splits."""

    draw: Callable[[int], Sum]
    write: Callable[[Sum], str | Messages]
    share: float
    seed: int

    def train(self, number: int) -> Problem:
        stream = (self.draw(derive(self.seed, "train", number, i)) for i in range(10_000))
        x = next(x for x in stream if not held_out(x, self.share))
        return self._problem(x, number)

    def test(self, size: int) -> list[Problem]:
        """Up to `size` different held-out problems; fewer where there are hardly more."""
        stream = random.Random(derive(self.seed, "test"))
        chosen: dict[Sum, None] = {}
        for _ in range(int(2 * size / self.share)):
            x = self.draw(stream.getrandbits(63))
            if x not in chosen and held_out(x, self.share):
                chosen[x] = None
            if len(chosen) == size:
                break
        return [self._problem(x, i) for i, x in enumerate(chosen)]

    def _problem(self, x: Sum, number: int) -> Problem:
        return Problem(self.write(x), str(x.result), number, solution=str(x.result))


def arithmetic(
    *,
    level: str = "default",
    digits: int | list | None = None,
    operations: str | None = None,
    last: int | None = None,
    held_out: float = 0.1,
    test_size: int = 500,
    seed: int = 0,
) -> Task:
    """`123+456=` -> `579`: text prompts for the model in the box.

    digits: how many each operand has, a number or [fewest, most]; operations: "+", "-" or "+-".
    last: a response is right that ends with the last so many digits of the answer.
    """
    chosen = TEXT_LEVELS[level]
    least, most = _digits(chosen["digits"] if digits is None else digits)
    signs = chosen["operations"] if operations is None else operations
    if not signs or set(signs) - set("+-"):
        raise ProxpoError(f"task arithmetic: operations are '+', '-' or '+-', got '{signs}'")
    if last is not None and last < 1:
        raise ProxpoError(f"task arithmetic: last is at least 1, got {last}")

    def draw(stream: int) -> Sum:
        stream, sign = divmod(stream, len(signs))
        stream, size_a = divmod(stream, most - least + 1)
        stream, size_b = divmod(stream, most - least + 1)
        return _ordered(stream, signs[sign], _range(least + size_a), _range(least + size_b))

    name = "arithmetic" if level == "default" else f"arithmetic:{level}"
    task = _task(name, draw, Sum.text, held_out, test_size, seed)
    return task if last is None else replace(task, reward=_last_digits(last))


def arithmetic_answer(level: str, digits: int | list | None) -> int:
    """Tokens of the longest answer: a digit more than the operands have, and the end token."""
    most = _digits(TEXT_LEVELS[level]["digits"] if digits is None else digits)[1]
    return max(8, most + 2)


def arithmetic_chat(
    *,
    level: str = "default",
    low: int | None = None,
    high: int | None = None,
    operations: str = "+",
    strict: bool = False,
    held_out: float = 0.2,
    test_size: int = 500,
    seed: int = 0,
) -> Task:
    """`What is 12 + 34? Answer with the number only.`: for instruct models; low <= a, b <= high.

    The last number of the response counts, so that "12 + 34 = 46" is as right as "46"; with
    strict=True the number must stand alone.
    """
    bounds = (
        CHAT_LEVELS[level]["low"] if low is None else low,
        CHAT_LEVELS[level]["high"] if high is None else high,
    )
    if not 0 <= bounds[0] < bounds[1]:
        raise ProxpoError(
            f"task arithmetic-chat: expected 0 <= low < high, got {bounds[0]} and {bounds[1]}"
        )
    if not operations or set(operations) - set("+-"):
        raise ProxpoError(
            f"task arithmetic-chat: operations are '+', '-' or '+-', got '{operations}'"
        )

    def draw(stream: int) -> Sum:
        stream, sign = divmod(stream, len(operations))
        return _ordered(stream, operations[sign], bounds, bounds)

    name = "arithmetic-chat" if level == "default" else f"arithmetic-chat:{level}"
    task = _task(name, draw, Sum.chat, held_out, test_size, seed)
    return task if strict else replace(task, reward=LAST_NUMBER)


def chat_answer(level: str, high: int | None) -> int:
    """Tokens of the longest answer that repeats the question, `12 + 34 = 46`, and a few more."""
    return 8 + 4 * len(str(CHAT_LEVELS[level]["high"] if high is None else high))


def _last_digits(count: int) -> RewardSpec:
    where = "proxpo.rewards.answers:last_digits"
    return RewardSpec(where=where, kwargs={"count": count}, trusted=True)


def _task(
    name: str,
    draw: Callable[[int], Sum],
    write: Callable[[Sum], str | Messages],
    share: float,
    test_size: int,
    seed: int,
) -> Task:
    if not 0 < share < 1:
        raise ProxpoError(f"task {name}: held_out is a share between 0 and 1, got {share}")
    if test_size < 1:
        raise ProxpoError(f"task {name}: test_size is at least 1, got {test_size}")
    made = Generated(draw, write, share, seed)
    test = made.test(test_size)
    if not test:
        raise ProxpoError(f"task {name}: held_out={share} leaves no problem to test on")
    return Task(name=name, train=Lazy(made.train, TRAIN_SIZE), test=test, reward=EXACT)


def _ordered(stream: int, sign: str, first: tuple[int, int], second: tuple[int, int]) -> Sum:
    stream, a = divmod(stream, first[1] - first[0] + 1)
    a, b = first[0] + a, second[0] + stream % (second[1] - second[0] + 1)
    return Sum(max(a, b), sign, min(a, b)) if sign == "-" else Sum(a, sign, b)


def _digits(digits: int | Sequence) -> tuple[int, int]:
    given = digits if isinstance(digits, Sequence) else (digits, digits)
    least, most = (*given, None, None)[:2]
    whole = isinstance(least, int) and isinstance(most, int)
    if not whole or not 1 <= least <= most <= 8:
        raise ProxpoError(
            f"task arithmetic: digits is a number from 1 to 8 or [fewest, most], got {digits!r}"
        )
    return least, most


def _range(digits: int) -> tuple[int, int]:
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1


__all__ = [
    "CHAT_LEVELS",
    "TEXT_LEVELS",
    "Generated",
    "Sum",
    "arithmetic",
    "arithmetic_answer",
    "arithmetic_chat",
    "chat_answer",
]
