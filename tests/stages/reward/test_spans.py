"""Rewards on spans of text."""

import pytest
import torch
from helpers import close, f64

from proxpo.stages.reward import find_span, span_values, token_values

TEXT = "First we add 3 and 4, which gives 8.  Then we double it."


def tokens_of(text: str, size: int = 3) -> list[tuple[int, int]]:
    """Pieces of `size` characters: they break words, as a tokenizer does."""
    return [(at, min(at + size, len(text))) for at in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("span", "found"),
    [
        ("add 3 and 4", "add 3 and 4"),
        ("  add 3 and 4 ", "add 3 and 4"),
        ("FIRST we", "First we"),
        ("gives 8. Then", "gives 8.  Then"),
        ("which give 8", "which gives 8."),
        ("whcih gives", "which gives"),
        ("multiply by seven", None),
        ("", None),
        ("   ", None),
    ],
)
def test_finding_a_span(span: str, found: str | None) -> None:
    place = find_span(TEXT, span)
    assert (None if place is None else TEXT[slice(*place)]) == found


def test_similarity_decides() -> None:
    assert find_span(TEXT, "whcih gives", similarity=0.99) is None
    assert find_span("", "anything") is None
    assert find_span("short", "a much longer span than the text") is None


def test_values_of_tokens() -> None:
    offsets = tokens_of(TEXT)
    found = span_values(TEXT, offsets, [("add 3 and 4,", 1.0), ("gives 8.", -1.0), ("nope", 1.0)])
    good, bad = find_span(TEXT, "add 3 and 4,"), find_span(TEXT, "gives 8.")
    for (start, end), value in zip(offsets, found.tolist()):
        written = [at for at in range(start, end) if not TEXT[at].isspace()]
        first = written[0] if written else -1
        inside = {1.0: good[0] <= first < good[1], -1.0: bad[0] <= first < bad[1]}
        assert value == next((mark for mark, there in inside.items() if there), 0.0)
    assert set(found.tolist()) == {-1.0, 0.0, 1.0}


def test_a_word_belongs_to_the_span_over_its_middle() -> None:
    text = "abcdef ghi"
    letters = tokens_of(text, 1)
    half = token_values(text, letters, [(0, 3, 1.0)])  # ends before the middle, 3
    more = token_values(text, letters, [(0, 4, 1.0)])
    close(half, torch.zeros(10).double())
    close(more, f64([1] * 6 + [0] * 4))
