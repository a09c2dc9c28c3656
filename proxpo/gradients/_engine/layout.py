"""Layout of a micro-batch: the sequence of every position, and sums over positions.

Axis legend of this package:
    pos  positions of the micro-batch, flattened (T); prompts included, padding numbered -1
    row  sequences of the micro-batch (m)
    out, inp  the two sides of a weight, O x D
    pick  positions of the overlap set J (M)
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from proxpo.gradients._engine.device import accumulator, capturing, matmul
from proxpo.gradients._engine.shard import Shard
from proxpo.ops.shapes import Float, Int, Shaped, Tensor

# Above this many entries a one-hot matrix costs more to hold than atomics cost to run.
_ONE_HOT_LIMIT = 1 << 25


class Layout:
    """The sequence number of every position, and sums over positions of one sequence.

    With a `shard` these are the positions of one rank out of several. Sums are of this rank then;
    `total` adds them over the ranks, and `fetch` reads positions of any rank.
    """

    def __init__(self, seq: Int[Tensor, " pos"], count: int, shard: Shard | None = None) -> None:
        self.seq = seq
        self.count = count
        self.shard = shard
        self.bounded = False
        self._whole = None if shard is None else Layout(shard.seq, count)

    @staticmethod
    def of_rows(seq: Int[Tensor, " pos"], count: int) -> "Layout":
        """Sequence i in row i of a padded batch, for the recording of CUDA graphs.

        Nothing is read from the device: `lengths` are upper bounds (`bounded`), and any row may
        hold padding, or nothing else. The gradient of padding is 0.
        """
        layout = Layout(seq, count)
        layout.bounded = True
        lengths = (seq.numel() // count,) * count
        layout.__dict__.update(_facts=(lengths, True, True, True), filled=0, padded=True)
        return layout

    @property
    def alone(self) -> bool:
        """True where no other rank holds positions of these sequences."""
        return self.shard is None

    @property
    def ranks(self) -> int:
        return 1 if self.shard is None else self.shard.ranks

    @property
    def whole(self) -> "Layout":
        """Layout of all positions of the sequences, those of other ranks included."""
        return self if self._whole is None else self._whole

    def total(self, x: Shaped[Tensor, "*any"]) -> Shaped[Tensor, "*any"]:
        """Σ over the ranks; x itself where there is one."""
        return x if self.shard is None else self.shard.total(x)

    def fetch(
        self, columns: Sequence[Shaped[Tensor, "pos ..."]], index: Int[Tensor, " some"]
    ) -> list[Tensor]:
        """Rows `index` of position-wise tensors; `index` counts the positions of `whole`."""
        if self.shard is None:
            return [x.index_select(0, index) for x in columns]
        return self.shard.fetch(columns, index)

    @property
    def size(self) -> int:
        return self.seq.numel()

    @cached_property
    def valid(self) -> Tensor:
        return self.seq >= 0

    @cached_property
    def first(self) -> Int[Tensor, " row"]:
        """First position of each sequence; `size` for a sequence without any."""
        return self._ends("amin", self.size)

    @cached_property
    def last(self) -> Int[Tensor, " row"]:
        """Last position of each sequence; -1 for a sequence without any."""
        return self._ends("amax", -1)

    def _ends(self, which: str, empty: int) -> Int[Tensor, " row"]:
        ends = torch.full((self.count + 1,), empty, device=self.seq.device)
        slot = torch.where(self.valid, self.seq, self.count)
        place = torch.arange(self.size, device=self.seq.device)
        return ends.scatter_reduce_(0, slot, place, which)[: self.count]

    @cached_property
    def _facts(self) -> tuple[tuple[int, ...], bool, bool, bool]:
        """Lengths, `aligned`, `disjoint` and `sorted`, read to the host in one wait."""
        counts = torch.bincount(self.seq + 1, minlength=self.count + 1)[1:]
        width = self.size // max(1, self.count)
        rows = torch.arange(self.size, device=self.seq.device).div(
            max(1, width), rounding_mode="floor"
        )
        aligned = torch.all((self.seq == rows) | (self.seq < 0))
        first, order = self.first.sort()
        disjoint = torch.all(self.last[order][:-1] < first[1:])
        ordered = torch.all(self.seq[1:] >= self.seq[:-1])
        flags = torch.stack([aligned, disjoint, ordered])
        *lengths, straight, apart, rising = torch.cat([counts, flags]).tolist()
        whole = bool(straight) and width * self.count == self.size
        return tuple(lengths), whole, bool(apart), bool(rising)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions per sequence; upper bounds if `bounded`."""
        return self._facts[0]

    @property
    def has_empty(self) -> bool:
        """True where a sequence has no position, or may have none."""
        return self.bounded or 0 in self.lengths

    @property
    def aligned(self) -> bool:
        """True where reshaping to (row, pos / row) puts each sequence into its own row."""
        return self._facts[1]

    @property
    def disjoint(self) -> bool:
        """True where no position of one sequence lies among those of another."""
        return self._facts[2]

    @property
    def sorted(self) -> bool:
        """True where the positions come sequence by sequence, padding first."""
        return self._facts[3]

    @cached_property
    def filled(self) -> int:
        """Number of positions that belong to a sequence; 0 if `bounded`: it is not known."""
        return sum(self.lengths)

    @cached_property
    def padded(self) -> bool:
        return self.filled < self.size

    @property
    def dirty(self) -> bool:
        """True where padding may have a gradient, which counts for nothing."""
        return self.padded and not self.bounded

    def settle(self) -> "Layout":
        """Reads lengths and alignment from the device now, while it is idle."""
        assert self._facts
        return self

    @property
    def known(self) -> bool:
        """True where lengths and alignment can be read without waiting for the device."""
        return "_facts" in self.__dict__ or not (self.seq.is_cuda or capturing())

    @property
    def known_aligned(self) -> bool:
        """`aligned` where it is known without waiting for the device, else False."""
        return self.known and self.aligned

    @cached_property
    def order(self) -> Tensor:
        """Positions sorted by sequence, padding first, each sequence in its own order."""
        return torch.argsort(self.seq, stable=True)

    @cached_property
    def _slots(self) -> Tensor:
        """Slot of each position in the (row, longest) grid; padding goes one past the end."""
        longest = max(self.lengths)
        starts = torch.tensor([0, *self.lengths], device=self.seq.device).cumsum(0)[:-1]
        rank = torch.empty_like(self.seq)
        rank[self.order] = torch.arange(self.size, device=self.seq.device)
        rank = rank - (self.size - sum(self.lengths)) - starts[self.seq.clamp(min=0)]
        slot = self.seq * longest + rank
        return torch.where(self.valid, slot, self.count * longest)

    def one_hot(self, dtype: torch.dtype) -> Tensor:
        """pos x row indicator; rows of padding are zero."""
        cache = self.__dict__.setdefault("_one_hot", {})
        if dtype not in cache:
            numbers = torch.arange(self.count, device=self.seq.device)
            cache[dtype] = (self.seq[:, None] == numbers).to(dtype)
        return cache[dtype]

    def sum_columns(self, x: Float[Tensor, "any pos"]) -> Float[Tensor, "any row"]:
        """Σ over the positions of each sequence, along the last axis."""
        if self.known_aligned:
            kept = x * self.valid.to(x.dtype) if self.dirty else x
            return kept.reshape(len(x), self.count, self.size // self.count).sum(2)
        if self.size * self.count <= _ONE_HOT_LIMIT:
            return x @ self.one_hot(x.dtype)
        sums = x.new_zeros(x.shape[0], self.count + 1)
        return sums.index_add_(1, self.seq.remainder(self.count + 1), x)[:, : self.count]

    def sum_rows(self, x: Float[Tensor, "pos any"]) -> Float[Tensor, "row any"]:
        """Σ over the positions of each sequence, along the first axis, in float32 or better."""
        if self.known_aligned:
            return self.grid(x, clear=True).sum(1, dtype=accumulator(x.dtype))
        if self.size * self.count <= _ONE_HOT_LIMIT:
            return matmul(self.one_hot(x.dtype).T, x)
        sums = x.new_zeros(self.count + 1, x.shape[1], dtype=accumulator(x.dtype))
        return sums.index_add_(0, self.seq.remainder(self.count + 1), x.to(sums.dtype))[:-1]

    def grid(self, x: Shaped[Tensor, "pos any"], *, clear: bool) -> Shaped[Tensor, "row len any"]:
        """Positions as (sequence, place, ...), a view where possible; `clear` zeroes padding."""
        if self.aligned:
            if clear and self.dirty:
                x = x * self.valid[:, None].to(x.dtype)
            return x.reshape(self.count, self.size // self.count, x.shape[1])
        longest = max(self.lengths)
        out = x.new_zeros(self.count * longest + 1, x.shape[1])
        return out.index_copy_(0, self._slots, x)[:-1].view(self.count, longest, x.shape[1])

    def members(self) -> Iterator[slice | Tensor]:
        """Yields the positions of each sequence: a slice where they are contiguous."""
        if self.aligned and not self.padded:
            width = self.size // self.count
            yield from (slice(i * width, (i + 1) * width) for i in range(self.count))
            return
        start = self.size - sum(self.lengths)
        for length in self.lengths:
            yield self.order[start : start + length]
            start += length

    def spread(self, weights: Float[Tensor, "*any row"]) -> Float[Tensor, "*any pos"]:
        """One number per sequence -> one per position; 0 on padding that is `dirty`."""
        if self.known_aligned and not self.dirty:
            return weights[..., None].expand(*weights.shape, self.size // self.count).flatten(-2)
        return torch.cat([weights, weights.new_zeros(*weights.shape[:-1], 1)], -1)[..., self.seq]

    def take(self, positions: Int[Tensor, " some"]) -> "Layout":
        """Layout of some of the positions; not for sharded ones, whose other ranks choose too."""
        assert self.shard is None
        return Layout(self.seq[positions], self.count)

    def scored(self, positions: Int[Tensor, " some"]) -> "Layout":
        """`take`; of a bounded layout the same columns of every row."""
        taken = self.take(positions)
        return Layout.of_rows(taken.seq, self.count) if self.bounded else taken

    def part(self, positions: slice, rows: slice) -> "Layout":
        """Layout of the sequences `rows`, which have the positions `positions`."""
        seq, count = self.seq[positions] - rows.start, rows.stop - rows.start
        return Layout.of_rows(seq.clamp(min=-1), count) if self.bounded else Layout(seq, count)

    def repeat(self, extra: int) -> "Layout":
        """Layout with every position `extra` times over, once for each head."""
        if extra == 1:
            return self
        shard = None if self.shard is None else self.shard.repeat(extra)
        return Layout(self.seq.repeat_interleave(extra), self.count, shard)

    def routed(
        self, experts: Int[Tensor, "pos k"], order: Int[Tensor, " pair"], sizes: list[int]
    ) -> "list[Layout]":
        """Layouts of the (position, expert) pairs of each expert, sorted by `order` and `sizes`."""
        parts = self.seq[order.div(experts.shape[1], rounding_mode="floor")].split(sizes)
        if self.shard is None:
            return [Layout(part, self.count) for part in parts]
        shards = self.shard.routed(experts, order, sizes)
        return [Layout(part, self.count, shard) for part, shard in zip(parts, shards)]

    @staticmethod
    def join(layouts: "list[Layout]") -> "Layout":
        """Layout of the positions of several calls of one module, one after the other."""
        shards = [part.shard for part in layouts if part.shard is not None]
        shard = Shard.join(shards) if shards else None
        return Layout(torch.cat([part.seq for part in layouts]), layouts[0].count, shard)
