"""Axes of a tensor inside the model that run over the positions of the micro-batch."""

import math
from collections.abc import Callable
from functools import lru_cache

from torch import nn

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor


class SequenceShape(tuple[int, ...]):
    """Shape of `sequences`; `single` if no sequence has more than one position.

    leading: the first axes of every tensor are known to be those of `sequences`
    """

    single: bool
    leading: bool

    def __new__(
        cls, lengths: tuple[int, ...], *, single: bool, leading: bool = False
    ) -> "SequenceShape":
        shape = super().__new__(cls, lengths)
        shape.single = single or len(lengths) == 1
        shape.leading = leading
        return shape


def position_axes(lead: tuple[int, ...], shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """The axes of `lead` that run over the positions of `sequences`, in order.

    Axes of length 1 count for nothing; the rest of `sequences`' shape must appear among the axes
    in order (other axes are heads and the like), or all positions in one flattened axis. One number
    per sequence, where the model has another axis for positions, is refused.
    """
    if getattr(shape, "leading", False) and tuple(lead[: len(shape)]) == tuple(shape):
        return tuple(range(len(shape)))
    return _axes(tuple(lead), tuple(shape), getattr(shape, "single", False), where)


@lru_cache(maxsize=4096)
def _axes(
    lead: tuple[int, ...], shape: tuple[int, ...], single: bool, where: str
) -> tuple[int, ...]:
    wide = [axis for axis, length in enumerate(lead) if length != 1]
    want = [length for length in shape if length != 1]
    flat = math.prod(shape)
    matches = _subsequences([lead[axis] for axis in wide], want)
    if len(want) > 1:
        matches += _subsequences([lead[axis] for axis in wide], [flat])
    if len(matches) > 1 and tuple(lead) == tuple(shape):
        matches = [tuple(range(len(wide)))]
    kept = len(shape) > 1 and lead.count(1) >= shape.count(1)
    if matches and single and not kept and len(wide) > len(want):
        raise ProxpoError(
            f"gradients.applied: {where} has an input of leading shape {lead}, and `sequences` of "
            f"shape {shape} has one number per sequence; pass one per position, shaped like "
            "input_ids"
        )
    if len(matches) == 1:
        return tuple(wide[place] for place in matches[0])
    problem = "cannot tell which axes hold the positions" if matches else "saw other positions"
    raise ProxpoError(
        f"gradients.applied: {where} {problem}: its input has leading shape {tuple(lead)}, "
        f"`sequences` has shape {tuple(shape)}; pass `sequences` shaped like input_ids"
        + (
            " (or packed, 1 x T), with a length that differs from the number of heads"
            if matches
            else " and let every layer see all positions (no logits_to_keep), or freeze it"
        )
        + (", in this order (batch_first=True)" if lead == shape[::-1] != shape else "")
    )


def _subsequences(lead: list[int], want: list[int]) -> list[tuple[int, ...]]:
    """Indices of every subsequence of `lead` that equals `want`."""
    if not want:
        return [()]
    matches = []
    for place, length in enumerate(lead):
        if length == want[0]:
            rest = _subsequences(lead[place + 1 :], want[1:])
            matches += [(place, *(place + 1 + later for later in tail)) for tail in rest]
    return matches


def broadcast(x: Tensor, shape: tuple[int, ...], trailing: int) -> Tensor:
    """Repeats a tensor shared by all sequences (position ids of shape 1 x L) to every position.

    Autograd would otherwise add up the sequences before their gradient arrives.
    """
    lead = tuple(x.shape[: x.dim() - trailing])
    padded = (1,) * (len(shape) - len(lead)) + lead
    shared = len(padded) == len(shape) and padded != tuple(shape) and padded[-1] == shape[-1]
    if shared and all(have in (1, want) for have, want in zip(padded, shape)):
        return x.expand(*shape, *x.shape[x.dim() - trailing :])
    return x


def with_channels_last(
    module: nn.Module, grad: Tensor, weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """Applies `weigh`, which expects features last, to the gradient of a module's output.

    torch's convolutions and norms over channels have them first: (B, C, L) becomes (B, L, C).
    """
    axis = -1
    if isinstance(module, nn.modules.conv._ConvNd):
        axis = grad.dim() - len(module.kernel_size) - 1
    elif isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase) and grad.dim() > 2:
        axis = 1
    return weigh(grad) if axis < 0 else weigh(grad.movedim(axis, -1)).movedim(-1, axis)


def flatten_positions(x: Tensor, shape: tuple[int, ...], where: str) -> tuple[Tensor, int]:
    """(..., D) -> (positions x extra, D), positions first; and `extra`, the rows a position has."""
    lead = tuple(x.shape[:-1])
    if lead == tuple(shape):
        return x.reshape(-1, x.shape[-1]), 1
    order, extra = _positions_first(lead, position_axes(lead, shape, where))
    return (x if order is None else x.permute(order)).reshape(-1, x.shape[-1]), extra


@lru_cache(maxsize=4096)
def _positions_first(
    lead: tuple[int, ...], chosen: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, int]:
    """Order of axes with those of the positions first, None where they are; size of the others."""
    others = [axis for axis in range(len(lead)) if axis not in chosen]
    order = (*chosen, *others, len(lead))
    extra = math.prod(lead[axis] for axis in others)
    return (None if order == tuple(range(len(order))) else order), extra
