"""Random draws of one block: the overlap sets of its parameters, and signs for projections."""

import hashlib
from typing import NamedTuple

import torch

from proxpo.gradients._engine.inner_products import OverlapSet
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.padded_rows import Draw, PaddedRows
from proxpo.ops.shapes import Int, Tensor


class DrawSeed(NamedTuple):
    """Seed of the random draws of one block."""

    seed: int
    step: int
    block: int
    rank: int

    def generator(self, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(repr(tuple(self)).encode()).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "big"))


class Draws:
    """Random draws of one block: overlap sets and signs."""

    def __init__(
        self,
        generator: torch.Generator,
        layout: Layout,
        padded: PaddedRows | None,
        *,
        parameters: int,
    ) -> None:
        """`parameters`: those with an overlap set, which are drawn together."""
        self.generator = generator
        self._layout = layout
        self._padded = padded
        self._parameters = parameters
        self._table: list[tuple[Tensor, Tensor]] | None = None

    def overlap_set(self, number: int, layout: Layout, size: int | None) -> OverlapSet:
        """`size` positions of a layout for the parameter of this number; all of them for None."""
        if size is None or size >= layout.whole.size:
            return OverlapSet.all(layout)
        if layout is not self._layout or number < 0:
            return OverlapSet.at(self._positions(layout.whole, 1, size)[0], layout)
        full = size <= layout.whole.filled  # padding is drawn last
        if self._table is None:
            index = self._positions(layout.whole, self._parameters, size)
            self._table = list(zip(index, layout.whole.valid[index]))
        return OverlapSet(*self._table[number], full=full)

    def signs(self, *shape: int) -> Int[Tensor, "..."]:
        """Zeros and ones at random."""
        device = self._layout.seq.device

        def draw(generator: torch.Generator) -> Int[Tensor, "..."]:
            return torch.randint(0, 2, shape, generator=generator, device=device)

        return self._random(draw)

    def _positions(self, layout: Layout, rows: int, size: int) -> Int[Tensor, "parameter pick"]:
        """`size` positions without replacement for each of `rows` parameters, padding last."""

        def draw(generator: torch.Generator) -> Int[Tensor, "parameter pick"]:
            step, padding = max(1, (1 << 25) // layout.size), layout.seq < 0
            drawn = []
            for start in range(0, rows, step):
                shape = (min(step, rows - start), layout.size)
                score = torch.rand(shape, generator=generator, device=layout.seq.device)
                score = score.masked_fill_(padding, -1.0)
                drawn.append(score.topk(size, dim=1, sorted=False).indices)
            return torch.cat(drawn)

        return self._random(draw)

    def _random(self, draw: Draw) -> Int[Tensor, "..."]:
        if self._padded is None:
            return draw(self.generator)
        return self._padded.random(self.generator, draw)
