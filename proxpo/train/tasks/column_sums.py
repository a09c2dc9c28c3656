"""Column sums: several numbers added column by column, with the carries written out.

A problem is held out for testing when the hash of its sorted numbers says so, as in arithmetic.py.
Responses have a line for each column, so that their length grows with the longest number.
"""

import random
from collections.abc import Sequence

from proxpo.errors import ProxpoError
from proxpo.ops.streams import derive
from proxpo.rewards._types import RewardSpec
from proxpo.train.tasks._lengths import with_room
from proxpo.train.tasks._types import Lazy, Problem, Task, with_system

TRAIN_SIZE = 1 << 20
LEVELS: dict[str, dict] = {
    "easy": {"terms": (2, 3), "digits": (1, 3)},
    "default": {"terms": (2, 4), "digits": (2, 6)},
    "hard": {"terms": (3, 6), "digits": (3, 8)},
}
SYSTEM = (
    "Add the numbers column by column, from the right, and write down every carry. Finish with a "
    "last line that holds the sum alone after four hash signs, like this: #### 42"
)


def column_answer(level: str, terms: int | list | None, digits: int | list | None) -> int:
    """Tokens of the longest answer: a line for each column, of at most three tokens a number."""
    chosen = LEVELS[level]
    most_terms = _bounds("terms", chosen["terms"] if terms is None else terms, 2, 9)[1]
    most_digits = _bounds("digits", chosen["digits"] if digits is None else digits, 1, 12)[1]
    return with_room(most_digits * (3 * most_terms + 16) + most_digits + 8)


def column_sums(
    *,
    level: str = "default",
    terms: int | list | None = None,
    digits: int | list | None = None,
    system: str = SYSTEM,
    held_out: float = 0.1,
    test_size: int = 500,
    seed: int = 0,
) -> Task:
    """`Add 4807, 392 and 56.`: reward 1 for the right number after `####`.

    terms: how many numbers are added; digits: of each; a number or [fewest, most].
    """
    chosen = LEVELS[level]
    terms_range = _bounds("terms", chosen["terms"] if terms is None else terms, 2, 9)
    digits_range = _bounds("digits", chosen["digits"] if digits is None else digits, 1, 12)
    if not 0 < held_out < 1 or test_size < 1:
        raise ProxpoError(
            "task column-sums: held_out is a share between 0 and 1 and test_size at least 1, got "
            f"{held_out} and {test_size}"
        )

    def draw(stream: int) -> tuple[int, ...]:
        chance = random.Random(stream)
        sizes = [chance.randint(*digits_range) for _ in range(chance.randint(*terms_range))]
        return tuple(chance.randint(10 ** (n - 1) if n > 1 else 0, 10**n - 1) for n in sizes)

    def is_held_out(numbers: Sequence[int]) -> bool:
        return derive(0, "held out", *sorted(numbers)) < held_out * 2**63

    def train(number: int) -> Problem:
        drawn = (draw(derive(seed, "train", number, i)) for i in range(10_000))
        return _problem(next(x for x in drawn if not is_held_out(x)), number, system)

    test: dict[tuple[int, ...], None] = {}
    for i in range(int(2 * test_size / held_out)):
        numbers = draw(derive(seed, "test", i))
        if len(test) < test_size and is_held_out(numbers):
            test[numbers] = None
    if not test:
        raise ProxpoError(f"task column-sums: held_out={held_out} leaves no problem to test on")
    return Task(
        name="column-sums" if level == "default" else f"column-sums:{level}",
        train=Lazy(train, TRAIN_SIZE),
        test=[_problem(numbers, i, system) for i, numbers in enumerate(test)],
        reward=RewardSpec(where="proxpo.rewards.answers:final_answer", trusted=True),
    )


def _problem(numbers: Sequence[int], index: int, system: str) -> Problem:
    *first, last = map(str, numbers)
    asked = f"Add {', '.join(first)} and {last}."
    prompt = with_system([{"role": "user", "content": asked}], system)
    return Problem(prompt, str(sum(numbers)), index, solution=column_addition(numbers))


def column_addition(numbers: Sequence[int]) -> str:
    """The addition with a line for each column: `7 + 2 + 6 = 15, write 5, carry 1`."""
    digits = [str(number)[::-1] for number in numbers]
    lines, carry = [], 0
    for place in range(max(map(len, digits))):
        column = [number[place] for number in digits if place < len(number)]
        column += [str(carry)] if carry else []
        total = sum(map(int, column))
        carry = total // 10
        lines.append(f"{' + '.join(column)} = {total}, write {total % 10}, carry {carry}")
    return "\n".join([*lines, f"#### {sum(numbers)}"])


def _bounds(name: str, value: int | Sequence, low: int, high: int) -> tuple[int, int]:
    least, most = (value, value) if isinstance(value, int) else (*value, None, None)[:2]
    whole = isinstance(least, int) and isinstance(most, int)
    if not whole or not low <= least <= most <= high:
        raise ProxpoError(
            f"task column-sums: {name} is a number from {low} to {high} or [fewest, most], "
            f"got {value!r}"
        )
    return least, most


__all__ = ["LEVELS", "column_addition", "column_answer", "column_sums"]
