"""Spans of text that a critique marked, turned into rewards on tokens.

A critique names passages and what each is worth: +1 for good ones, -1 for bad ones. Each passage is
located in the response, a word takes the value of the passage that covers its middle, and a token
the value of its word. Text2Grad, arXiv:2505.22338.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics

Span = tuple[int, int]
Placed = tuple[int, int, float]
_WORD = re.compile(r"\S+")


def find_span(text: str, span: str, *, similarity: float = 0.8) -> Span | None:
    """Characters [start, end) of the first passage like `span`; None if there is none.

    As written, or else up to case and white space, or else the run of as many words whose
    characters agree best, if the share that agrees (difflib's ratio) is at least `similarity`.
    """
    words = span.split()
    if not words:
        return None
    loose = r"\s+".join(re.escape(word) for word in words)
    for pattern, flags in ((re.escape(span.strip()), 0), (loose, re.IGNORECASE)):
        if match := re.search(pattern, text, flags):
            return match.span()
    return _most_similar(text, " ".join(words).lower(), len(words), similarity)


def _most_similar(text: str, wanted: str, count: int, similarity: float) -> Span | None:
    places = [match.span() for match in _WORD.finditer(text)]
    best, at = similarity, None
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    for i in range(max(len(places) - count, 0) + 1 if places else 0):
        start, end = places[i][0], places[min(i + count, len(places)) - 1][1]
        matcher.set_seq1(" ".join(text[start:end].lower().split()))
        # The cheap bounds first; the first of equals stays.
        if matcher.real_quick_ratio() < best or matcher.quick_ratio() < best:
            continue
        ratio = matcher.ratio()
        if ratio > best or (at is None and ratio >= best):
            best, at = ratio, (start, end)
    return at


def span_values(
    text: str,
    offsets: Sequence[Span],
    marks: Iterable[tuple[str, float]],
    *,
    unmarked: float = 0.0,
    similarity: float = 0.8,
) -> Float[Tensor, " tok"]:
    """δ_t of each token, from passages and their values; `token_values` of where they are.

        span_values(text, offsets, [("a clear plan", +1.0), ("7 * 8 = 54", -1.0)])

    offsets: [start, end) of each token in `text`, as fast tokenizers return them. Passages that are
    not found are ignored. The released trainer for code: wrong code -1, code that needs improvement
    0, unmarked=1.
    """
    places = [(find_span(text, span, similarity=similarity), value) for span, value in marks]
    placed = [(*place, value) for place, value in places if place is not None]
    return token_values(text, offsets, placed, unmarked=unmarked)


def token_values(
    text: str,
    offsets: Sequence[Span],
    placed: Sequence[Placed],
    *,
    unmarked: float = 0.0,
) -> Float[Tensor, " tok"]:
    """δ_t: the value of the span (start, end, value) that covers the middle of the token's word.

    Where spans overlap the lower value wins. A token's word is that of its first character other
    than white space; a token without one is unmarked.
    """
    of_character = [unmarked] * len(text)
    for word in _WORD.finditer(text):
        start, end = word.span()
        middle = (start + end) / 2
        covering = [value for left, right, value in placed if left <= middle < right]
        of_character[start:end] = [min(covering, default=unmarked)] * (end - start)
    out = []
    for start, end in offsets:
        if not 0 <= start <= end <= len(text):
            raise ProxpoError(
                f"token_values: a token at [{start}, {end}) lies outside the text of "
                f"{len(text)} characters"
            )
        written = _WORD.search(text, start, end)
        out.append(of_character[written.start()] if written else unmarked)
    return torch.tensor(out, dtype=torch.float64)


@stage("reward", needs=("span_rewards",))
def span_reward(*, outcome: bool = False):
    """ρ_t = δ_t, the marks of a critique as token rewards. Text2Grad, arXiv:2505.22338.

    The response's own reward, and token rewards that were there, do not count; outcome=True keeps
    both.

    outcome: keep the response's own reward and earlier token rewards
    """

    def shape(batch: Batch, ctx: Context) -> tuple[Batch, Metrics]:
        marked = batch.span_rewards.to(batch.logp.dtype)
        metrics = {"reward/marked": masked_mean(marked != 0, batch.mask)}
        if outcome:
            there = 0.0 if batch.token_rewards is None else batch.token_rewards
            return batch.replace(token_rewards=marked + there), metrics
        none = marked.new_zeros(len(marked))
        return batch.replace(token_rewards=marked, rewards=none), metrics

    return shape


__all__ = ["find_span", "span_reward", "span_values", "token_values"]
