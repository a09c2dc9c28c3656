"""Worked solutions of reasoning-gym problems, written from the metadata of an entry.

The package gives answers without steps. Each solution ends with the answer between <answer> tags.
"""

from collections.abc import Callable
from typing import Any


def worked(name: str, entry: dict[str, Any]) -> str:
    """The worked solution of an entry of the dataset `name`; empty where none is written here."""
    steps = WORKED.get(name)
    if steps is None:
        return ""
    return "\n".join([*steps(entry["metadata"]), f"<answer>{entry['answer']}</answer>"])


def _chain_sum(metadata: dict[str, Any]) -> list[str]:
    """Running totals: `4 - 1 = 3`, `3 - 7 = -4`."""
    first, *rest = metadata["expression"].split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2]):
        before, total = total, total + int(term) * (1 if sign == "+" else -1)
        lines.append(f"{before} {sign} {term} = {total}")
    return lines


def _gcd(metadata: dict[str, Any]) -> list[str]:
    """Euclid's divisions: `780 = 1 * 461 + 319`."""
    first, *rest = metadata["numbers"]
    lines = []
    for number in rest:
        a, b = max(first, number), min(first, number)
        while b:
            lines.append(f"{a} = {a // b} * {b} + {a % b}")
            a, b = b, a % b
        lines.append(f"The greatest common divisor of {first} and {number} is {a}.")
        first = a
    return lines


def _letter_counting(metadata: dict[str, Any]) -> list[str]:
    """Each word with its letters, the number of hits and their total so far."""
    letter, total, lines = metadata["target_letter"], 0, []
    for word in metadata["span"]:
        hits = word.lower().count(letter)
        total += hits
        lines.append(f"{word}: {' '.join(word.lower())}, {letter} {hits}, total {total}")
    return lines


WORKED: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "chain_sum": _chain_sum,
    "gcd": _gcd,
    "letter_counting": _letter_counting,
}

__all__ = ["WORKED", "worked"]
