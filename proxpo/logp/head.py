"""The language-model head and the softmax, tile by tile, and the hook into their backward pass.

Forward keeps hidden states, targets and the logsumexp; backward computes every tile of logits
again and turns it into its gradient on the spot. Axes: `tok`, `vocab`, `dim`.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from proxpo.logp import _tile
from proxpo.logp._tile import SoftmaxStats, TokenGrads, Warp, tile_shape
from proxpo.ops.blocks import blocks
from proxpo.ops.shapes import Float, Int, Tensor

HeadGradients = tuple[Float[Tensor, "tok dim"] | None, list[Float[Tensor, "vocab _"]]]


class HeadTokens(NamedTuple):
    """Tokens in the backward pass: hidden states, targets and the gradients of their log-probs."""

    hidden: Float[Tensor, "tok dim"]
    targets: Int[Tensor, " tok"]
    grads: TokenGrads

    def take(self, index: slice | Int[Tensor, " row"]) -> "HeadTokens":
        return HeadTokens(self.hidden[index], self.targets[index], self.grads.take(index))

    def scaled(self, factor: Float[Tensor, " tok"]) -> "HeadTokens":
        """The tokens with their gradients times a factor each."""
        return self._replace(grads=self.grads.scaled(factor))


@dataclass(frozen=True)
class Head:
    """x = h Wᵀ + b, the warp that makes logits of x, and the number of logits held at once."""

    weight: Float[Tensor, "vocab dim"]
    bias: Float[Tensor, " vocab"] | None
    warp: Warp
    budget: int

    def __call__(self, hidden: Float[Tensor, "tok dim"], cols: slice) -> Float[Tensor, "tok col"]:
        if self.bias is None:
            return hidden @ self.weight[cols].T
        return torch.addmm(self.bias[cols], hidden, self.weight[cols].T)

    def grad(self, tokens: HeadTokens, cols: slice) -> Float[Tensor, "tok col"]:
        """g = dL/dx of a vocabulary block, from its logits computed again."""
        hidden, targets, grads = tokens
        x = self(hidden, cols)
        return tile_functions(x).logit_grad(x, targets - cols.start, grads, self.warp)

    def tile(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return tile_shape(tokens, len(self.weight), self.budget)


def tile_functions(x: Float[Tensor, "tok col"]) -> Any:
    """The module whose `absorb` and `logit_grad` suit a tile: Triton's on CUDA, or plain torch."""
    fused = x.is_cuda and x.dtype != torch.float64 and x.numel() > 0 and _has_triton()
    return _triton() if fused else _tile


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton() -> Any:
    return importlib.import_module("proxpo.logp._triton")


def softmax_stats(
    head: Head, hidden: Float[Tensor, "tok dim"], targets: Int[Tensor, " tok"], *, entropy: bool
) -> SoftmaxStats:
    """Softmax statistics of every token, from logits that live one tile at a time."""
    rows, cols = head.tile(len(hidden))
    parts = []
    for row in blocks(len(hidden), rows):
        stats = SoftmaxStats.empty(row.stop - row.start, hidden, entropy=entropy)
        for col in blocks(len(head.weight), cols):
            x = head(hidden[row], col)
            absorb = tile_functions(x).absorb
            stats = absorb(stats, x, targets[row] - col.start, head.warp)
        parts.append(stats)
    return SoftmaxStats.join(parts)


def head_backward(
    head: Head, tokens: HeadTokens, sides: Sequence[Float[Tensor, "tok _"]], *, to_hidden: bool
) -> HeadGradients:
    """dh = g W, and gᵀ s for every s of `sides`: s = h gives dW, s = 1 gives db.

    A vocabulary block of gᵀ s is finished before the next one begins and written once: no copy of
    the whole weight gradient in float32 exists.
    """
    count, precise = len(tokens.hidden), tokens.grads.d_logp.dtype
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


class HeadCall(NamedTuple):
    """One call of `token_logp`, as its backward pass may want to know it."""

    weight: Tensor
    bias: Tensor | None
    lead: torch.Size  # shape of the hidden states without their last axis
    scored: Int[Tensor, " tok"] | None  # indices of the scored positions; None for all


# (head, tokens, sides by parameter name, to_hidden=...) -> as `head_backward`
Backward = Callable[..., HeadGradients]
Finder = Callable[[HeadCall], Backward | None]
_FINDERS: list[Finder] = []


@contextmanager
def replaced_backward(finder: Finder) -> Iterator[None]:
    """Asks `finder`, while the block is open, for the backward pass of every call of the head.

    The finder returns a function in place of `head_backward`, or None for a call that is not its
    concern. The block opened last is asked first.
    """
    _FINDERS.append(finder)
    try:
        yield
    finally:
        _FINDERS.remove(finder)


def find_backward(call: HeadCall) -> Backward | None:
    """The backward pass that an open `replaced_backward` block offers for a call; None for none."""
    offers = (finder(call) for finder in _FINDERS[::-1])
    return next((backward for backward in offers if backward is not None), None)
