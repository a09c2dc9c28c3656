"""Groups of the sequences of a micro-batch: those of one group share a kernel.

Axes: `group` groups, `member` places of a group, `place` = group x member, flattened.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from proxpo.ops.shapes import Float, Int, Shaped, Tensor


@dataclass(frozen=True)
class Groups:
    """`count` groups with `size` places each; groups with fewer sequences leave places empty.

    `sequence` is the sequence at every place (-1 for none) and `place` the place of every sequence;
    None where the sequences fill the places in their own order.
    """

    count: int
    size: int
    sequence: Int[Tensor, " place"] | None = None
    place: Int[Tensor, " row"] | None = None

    @staticmethod
    def whole(sequences: int) -> "Groups":
        """One group of all sequences."""
        return Groups(1, sequences)

    @staticmethod
    def of(numbers: Int[Tensor, " row"]) -> "Groups":
        """Groups of sequences with equal numbers; reads the numbers to the host."""
        members = members_of(numbers)
        size = max(map(len, members))
        sequence = [i for rows in members for i in (*rows, *[-1] * (size - len(rows)))]
        if sequence == list(range(len(numbers))):
            return Groups(len(members), size)
        order = torch.tensor(sequence, device=numbers.device)
        place = order.argsort()[len(order) - len(numbers) :]
        return Groups(len(members), size, order, place)

    @staticmethod
    def empty(count: int, size: int, sequences: int, device: torch.device) -> "Groups":
        """Groups without members, in memory for `load`."""
        sequence = torch.full((count * size,), -1, device=device)
        return Groups(
            count, size, sequence, torch.zeros(sequences, dtype=torch.long, device=device)
        )

    def load(self, members: list[list[int]]) -> None:
        """Fills the places with the sequences of each group; other sequences stand for padding."""
        assert self.sequence is not None
        assert self.place is not None
        sequence = [-1] * len(self.sequence)
        place = [0] * len(self.place)
        for group, rows in enumerate(members):
            for number, row in enumerate(rows, start=group * self.size):
                sequence[number], place[row] = row, number
        self.sequence.copy_(torch.tensor(sequence))
        self.place.copy_(torch.tensor(place))

    def arranged(self, x: Shaped[Tensor, "row *any"]) -> Shaped[Tensor, "place *any"]:
        """Numbers by sequence -> by place; 0 at empty places."""
        if self.sequence is None:
            return x
        filled = (self.sequence >= 0).view(-1, *[1] * (x.dim() - 1))
        return torch.where(filled, x.index_select(0, self.sequence.clamp(min=0)), 0)

    def by_sequence(self, x: Shaped[Tensor, "place *any"]) -> Shaped[Tensor, "row *any"]:
        """Numbers by place -> by sequence."""
        return x if self.place is None else x.index_select(0, self.place)

    def blocks(self, kernel: Float[Tensor, "row row"]) -> Float[Tensor, "group member member"]:
        """The kernel of every group out of that of all sequences."""
        arranged = self.arranged(self.arranged(kernel).T)
        square = arranged.unflatten(1, (self.count, self.size)).unflatten(0, (self.count, -1))
        return square.diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def joined(self, kernel: Float[Tensor, "group member member"]) -> Float[Tensor, "row row"]:
        """The kernel of all sequences, 0 between groups."""
        return self.by_sequence(self.by_sequence(torch.block_diag(*kernel)).T)


def members_of(numbers: Int[Tensor, " row"]) -> list[list[int]]:
    """Sequences of each group, in order of appearance; reads the numbers to the host."""
    members: dict[Hashable, list[int]] = {}
    for row, number in enumerate(numbers.tolist()):
        members.setdefault(number, []).append(row)
    return list(members.values())
