"""Blocks on padded rows in memory that stays where it is, so that their kernels can be replayed."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients._engine.averages import Collected
from proxpo.gradients._engine.groups import Groups
from proxpo.ops.shapes import Bool, Float, Int, Tensor

Draw = Callable[[torch.Generator], Tensor]


class Lengths(NamedTuple):
    """Squared lengths of one key, or their mean, as a rule measures them."""

    key: str
    squares: Float[Tensor, "*any"]
    mean: bool


class _Results(NamedTuple):
    """Results of a recorded block: Σ x² of every key, and what must be finite."""

    keys: tuple[str, ...]
    sizes: tuple[int, ...]  # rows behind each sum; 0 where it is a mean
    sums: Float[Tensor, " key"]
    numbers: tuple[tuple[str, Tensor], ...]
    finite: Bool[Tensor, ""]


class PaddedRows:
    """Inputs, random draws and results of a block, where recorded kernels read and write them.

    Sequence i lies in row i of `sequences`, between padding, whose gradient must be 0; rows behind
    the last one hold padding alone. `count` is the number of sequences, `fill` their share in the
    rows.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        groups: tuple[int, int] | None = None,
    ) -> None:
        """`groups`: number and size of the groups that share a kernel; None for one of all."""
        self.sequences = torch.full((rows, columns), -1, device=device)
        self.advantages = torch.zeros(rows, dtype=dtype, device=device)
        self.groups = Groups.whole(rows) if groups is None else Groups.empty(*groups, rows, device)
        self.count = torch.ones((), dtype=dtype, device=device)
        self.fill = 1.0
        self._draws: list[tuple[Tensor, Draw]] = []
        self._recording: Iterator[tuple[Tensor, Draw]] | None = None
        self._results: _Results | None = None

    def load(
        self,
        sequences: Int[Tensor, "seq pos"],
        advantages: Float[Tensor, " seq"],
        members: list[list[int]] | None,
    ) -> None:
        """Puts a micro-batch into the first rows; `members`: the sequences of each group."""
        number, rows = len(advantages), len(self.advantages)
        if members is not None:
            self.groups.load(members)
        inputs = (self.sequences, sequences, -1), (self.advantages, advantages, 0)
        for buffer, value, nothing in inputs:
            buffer[:number].copy_(value)
            if number < rows:
                buffer[number:].fill_(nothing)
        self.count.fill_(number)
        self.fill = number / rows

    def open(self, *, recorded: bool) -> None:
        """Starts a block. A recorded one finds its draws where those of the block before lie."""
        if recorded:
            self._recording = iter(self._draws)
        else:
            self._recording, self._draws = None, []

    def random(self, generator: torch.Generator, draw: Draw) -> Int[Tensor, "..."]:
        """Random whole numbers: drawn now, or in a recording the buffer that replays fill."""
        if self._recording is not None:
            return next(self._recording)[0]
        self._draws.append((draw(generator), draw))
        return self._draws[-1][0]

    def redraw(self, generator: torch.Generator) -> None:
        """Fills the buffers, in the order in which the block asked for them."""
        for buffer, draw in self._draws:
            buffer.copy_(draw(generator))

    def keep(self, lengths: Sequence[Lengths], numbers: Sequence[tuple[str, Tensor]]) -> None:
        """Stacks what the recorded block has measured; itself a part of the recording."""
        by_size: dict[int, list[Lengths]] = {}
        for part in lengths:
            by_size.setdefault(part.squares.numel(), []).append(part)
        parts = [part for alike in by_size.values() for part in alike]
        sums = [
            torch.stack([part.squares.reshape(-1) for part in alike]).sum(1, dtype=torch.float64)
            for alike in by_size.values()
        ]
        everything = [self.advantages, *(x.reshape(-1) for _, x in numbers)]
        finite = torch.isfinite(torch.cat(everything)).all()
        self._results = _Results(
            keys=tuple(part.key for part in parts),
            sizes=tuple(0 if part.mean else part.squares.numel() for part in parts),
            sums=torch.cat(sums) if sums else self.advantages.new_zeros(0),
            numbers=tuple(numbers),
            finite=finite,
        )

    def check_finite(self) -> None:
        """Raises where a replay gave numbers that are not finite."""
        assert self._results is not None
        if bool(self._results.finite):
            return
        check_advantages(self.advantages)
        raise_not_finite(self._results.numbers)

    def collected(self) -> list[Collected]:
        """Lengths that a replay has measured, for the trailing averages."""
        assert self._results is not None
        keys, sizes, sums = self._results[:3]
        return [Collected(keys, sums.clone(), tuple(size * self.fill or 1.0 for size in sizes))]


def check_advantages(advantages: Float[Tensor, " row"]) -> None:
    """Refuses advantages that are not finite."""
    if not bool(torch.isfinite(advantages).all()):
        raise ProxpoError("gradients.applied: `advantages` holds NaN or infinity")


def raise_not_finite(numbers: Sequence[tuple[str, Tensor]]) -> None:
    """Raises with the name of the first parameter whose numbers are not finite."""
    name = next(n for n, x in numbers if not bool(torch.isfinite(x).all()))
    raise NotFiniteError(
        f"gradients.applied: the gradient of {name} is not finite: its input or the gradient of "
        "its output holds NaN or infinity; p.grad must not be used",
        name,
    )
