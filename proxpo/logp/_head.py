"""The language-model head and the softmax as one autograd function, tile by tile.

Forward keeps hidden states, targets and the logsumexp; backward computes every tile of logits
again and turns it into its gradient on the spot. Axes: `tok`, `vocab`, `dim`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from proxpo.logp._tile import Pull, Stats, Warp, absorb, blocks, logit_grad, tile_shape
from proxpo.ops.shapes import Float, Int, Tensor


class Rows(NamedTuple):
    """Tokens on their way back: hidden states, targets and the pull on their log-probs."""

    hidden: Float[Tensor, "tok dim"]
    targets: Int[Tensor, " tok"]
    pull: Pull

    def take(self, index: slice | Int[Tensor, " row"]) -> "Rows":
        return Rows(self.hidden[index], self.targets[index], self.pull.rows(index))


@dataclass(frozen=True)
class Head:
    """x = h Wᵀ + b, the warp that makes logits of it, and how many of them may exist at once."""

    weight: Float[Tensor, "vocab dim"]
    bias: Float[Tensor, " vocab"] | None
    warp: Warp
    budget: int

    def __call__(self, hidden: Float[Tensor, "tok dim"], cols: slice) -> Float[Tensor, "tok col"]:
        if self.bias is None:
            return hidden @ self.weight[cols].T
        return torch.addmm(self.bias[cols], hidden, self.weight[cols].T)

    def grad(self, tokens: Rows, cols: slice) -> Float[Tensor, "tok col"]:
        """g = dL/dx of a vocabulary block, from its logits computed again."""
        hidden, targets, pull = tokens
        return logit_grad(self(hidden, cols), targets - cols.start, pull, self.warp)

    def tile(self, tokens: int) -> tuple[int, int]:
        return tile_shape(tokens, len(self.weight), self.budget)


def softmax_stats(
    head: Head, hidden: Float[Tensor, "tok dim"], targets: Int[Tensor, " tok"], *, entropy: bool
) -> Stats:
    """Softmax statistics of every token, from logits that live one tile at a time."""
    rows, cols = head.tile(len(hidden))
    parts = []
    for row in blocks(len(hidden), rows):
        stats = Stats.empty(row.stop - row.start, hidden, entropy=entropy)
        for col in blocks(len(head.weight), cols):
            stats = absorb(stats, head(hidden[row], col), targets[row] - col.start, head.warp)
        parts.append(stats)
    return Stats.join(parts)


def pull_back(
    head: Head, tokens: Rows, sides: Sequence[Float[Tensor, "tok _"]], *, to_hidden: bool
) -> tuple[Float[Tensor, "tok dim"] | None, list[Float[Tensor, "vocab _"]]]:
    """dh = g W, and gᵀ s for every s of `sides`: s = h gives dW, s = 1 gives db.

    A vocabulary block of gᵀ s is finished before the next one begins and written once: no copy of
    the whole weight gradient in float32 exists.
    """
    count, precise = len(tokens.hidden), tokens.pull.logp.dtype
    rows, cols = head.tile(count)
    d_hidden = torch.zeros_like(tokens.hidden, dtype=precise) if to_hidden else None
    outs = [side.new_empty(len(head.weight), side.shape[1]) for side in sides]
    for col in blocks(len(head.weight), cols):
        finals = [out[col] for out in outs]
        sums = finals if rows >= count else [torch.empty_like(x, dtype=precise) for x in finals]
        for row in blocks(count, rows):
            g = head.grad(tokens.take(row), col)
            if d_hidden is not None:
                add_matmul_(d_hidden[row], g, head.weight[col])
            for total, side in zip(sums, sides):
                add_matmul_(total, g.T, side[row], fresh=row.start == 0)
            del g  # before the next tile needs as much
        for final, total in zip(finals, sums):
            if final is not total:
                final.copy_(total)
    return d_hidden, outs


def add_matmul_(
    total: Float[Tensor, "row col"],
    x: Float[Tensor, "row inner"],
    y: Float[Tensor, "inner col"],
    *,
    fresh: bool = False,
) -> None:
    """total += x y, or total = x y when `fresh`; half-precision factors may sum up in float32."""
    beta = 0.0 if fresh else 1.0
    if total.dtype == x.dtype:
        total.addmm_(x, y, beta=beta)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, x, y, total.dtype, beta=beta, out=total)
    else:
        product = x @ y
        total.copy_(product) if fresh else total.add_(product)
