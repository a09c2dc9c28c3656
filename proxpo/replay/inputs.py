"""Inputs of recorded passes, in one of few shapes."""

from typing import NamedTuple, TypeVar

import torch
from torch.nn.functional import pad

from proxpo.ops.shapes import Int, Tensor
from proxpo.replay.prefix import prompts_of
from proxpo.replay.sequences import Sequences

COLUMNS = 16  # prompts and responses are padded to multiples of this


class PassShape(NamedTuple):
    """Sizes of a pass that runs each prompt once."""

    groups: int
    prompt: int
    rows: int
    tokens: int

    @property
    def positions(self) -> int:
        return self.groups * self.prompt + self.rows * self.tokens

    def rounded(self) -> "PassShape":
        """One of few larger shapes."""
        sizes = rounded(self.groups), _columns(self.prompt)
        return PassShape(*sizes, rounded(self.rows), _columns(self.tokens))


class RowShape(NamedTuple):
    """Sizes of a pass over whole sequences."""

    rows: int
    prompt: int
    tokens: int

    @property
    def positions(self) -> int:
        return self.rows * (self.prompt + self.tokens)

    def rounded(self) -> "RowShape":
        """One of few larger shapes."""
        return RowShape(rounded(self.rows), _columns(self.prompt), _columns(self.tokens))


Shape = TypeVar("Shape", PassShape, RowShape)


class PassInputs(NamedTuple):
    """Distinct prompts padded on the left, their responses padded on the right."""

    prompts: Int[Tensor, "group pos"]
    pad: Int[Tensor, " group"]
    which: Int[Tensor, " seq"]
    responses: Int[Tensor, "seq tok"]

    @property
    def shape(self) -> PassShape:
        return PassShape(*self.prompts.shape, *self.responses.shape)

    def padded(self, shape: PassShape) -> "PassInputs":
        """The inputs in a larger shape. Added prompts and responses are answered by nobody."""
        groups, left, rows, right = (new - old for new, old in zip(shape, self.shape))
        return PassInputs(
            pad(self.prompts, (left, 0, 0, groups)),
            pad(self.pad + left, (0, groups)),
            pad(self.which, (0, rows)),
            pad(self.responses, (0, right, 0, rows)),
        )


class RowInputs(NamedTuple):
    """Whole sequences from the first column on, and the column of each one's first response token.

    sequences: the number of each position's row, -1 for padding
    """

    ids: Int[Tensor, "seq pos"]
    sequences: Int[Tensor, "seq pos"]
    start: Int[Tensor, " seq"]
    shape: RowShape

    def padded(self, shape: RowShape) -> "RowInputs":
        """The inputs with the columns of a larger shape; rows are not added."""
        right = shape.prompt + shape.tokens - self.ids.shape[1]
        return RowInputs(
            pad(self.ids, (0, right)), pad(self.sequences, (0, right), value=-1), self.start, shape
        )


def rounded(count: int) -> int:
    """The next of 1, 2 ... 16, 18, 20 ... 32, 36, 40 ...: eight sizes to each power of two."""
    step = max(1, (1 << max(count - 1, 0).bit_length()) // 16)
    return -(-count // step) * step


def _columns(count: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, 256 ..."""
    power = max(COLUMNS, 1 << max(count - 1, 0).bit_length())
    return power * 3 // 4 if power > 2 * COLUMNS and count <= power * 3 // 4 else power


def pass_inputs(rows: Sequences) -> PassInputs:
    """The prompts and responses of some rows."""
    prompts = prompts_of(rows)
    return PassInputs(*prompts, rows.input_ids[:, -rows.mask.shape[1] :])


def row_inputs(rows: Sequences) -> RowInputs:
    """The whole sequences of some rows, their padding on the left moved to the right."""
    (count, length), tokens = rows.input_ids.shape, rows.mask.shape[1]
    number = torch.arange(count, device=rows.mask.device)[:, None]
    sequences = torch.where(rows.attention_mask, number, -1)
    before = (~rows.attention_mask[:, : length - tokens]).sum(dim=1)
    column = torch.arange(length, device=before.device)
    moved = (column + before[:, None]) % length
    return RowInputs(
        rows.input_ids.gather(1, moved),
        sequences.gather(1, moved),
        length - tokens - before,
        RowShape(count, length - tokens, tokens),
    )


__all__ = [
    "PassInputs",
    "PassShape",
    "RowInputs",
    "RowShape",
    "Shape",
    "pass_inputs",
    "rounded",
    "row_inputs",
]
