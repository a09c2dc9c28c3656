"""Layers of a model under `torch.compile`: the forward is traced, the backward is one operation.

    begin            registers a call of a layer while the compiled forward runs
    layer_backward   computes what the layer's backward in `matrices` or `vectors` computes

Both are opaque to the compiler, so that the model stays one graph. Objects do not pass through a
graph: a layer goes by its number, a call by a tensor that holds its place in `Session.calls`.
Gradients cannot be absent there: while other calls of the module are still to come, they are zeros.
Shapes are not annotated in traced functions, as the compiler does not follow their checks.
"""

import itertools
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from proxpo.gradients._engine.session import Session
from proxpo.ops.shapes import Tensor


@runtime_checkable
class Layer(Protocol):
    """A layer that the operations find by its number."""

    session: Session

    def begin(self, x: Tensor) -> Any:
        """Registers a call with the input x."""
        ...

    def gradients(
        self, call: Any, grad: Tensor, saved: list[Tensor], needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the tensors that the forward saved, where `needs` asks for them."""
        ...


_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, Layer] = WeakValueDictionary()


def numbered(layer: Layer) -> int:
    """A number by which the operations find the layer."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("proxpo::begin", mutates_args=())
def begin(x: torch.Tensor, layer: int) -> torch.Tensor:
    """The place of a new call among those of the session."""
    known = _LAYERS[layer]
    calls = known.session.calls
    calls.append(known.begin(x))
    return torch.tensor(len(calls) - 1)


@begin.register_fake
def _(x: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("proxpo::layer_backward", mutates_args=())
def layer_backward(
    grad: torch.Tensor, saved: list[torch.Tensor], call: torch.Tensor, layer: int, needs: list[bool]
) -> list[torch.Tensor]:
    """Gradients of those saved tensors that `needs` names."""
    known = _LAYERS[layer]
    gradients = known.gradients(known.session.calls[int(call)], grad, saved, needs)
    return [
        torch.zeros_like(x) if made is None else made.contiguous()
        for x, made, wanted in zip(saved, gradients, needs)
        if wanted
    ]


@layer_backward.register_fake
def _(
    grad: torch.Tensor, saved: list[torch.Tensor], call: torch.Tensor, layer: int, needs: list[bool]
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, wanted in zip(saved, needs) if wanted]


def _backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """A gradient for every saved tensor, None where none is needed."""
    *saved, call = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[: len(saved)])
    made = iter(torch.ops.proxpo.layer_backward(grad, saved, call, ctx.layer, needs))
    return [next(made) if wanted else None for wanted in needs]


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, layer: int
    ) -> Tensor:
        saved = [x, weight] if bias is None else [x, weight, bias]
        ctx.save_for_backward(*saved, torch.ops.proxpo.begin(x, layer))
        ctx.layer = layer
        kernel = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        return F.linear(x, kernel.T if transposed else kernel, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(ctx, grad)
        return *gradients, *[None] * (5 - len(gradients))


class _Embedding(torch.autograd.Function):
    """Rows of an embedding."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, layer: int) -> Tensor:
        ctx.save_for_backward(weight, ids, torch.ops.proxpo.begin(ids[..., None], layer))
        ctx.layer = layer
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)[0], None, None


class _Expand(torch.autograd.Function):
    """A vector repeated for every position of x."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, x: Tensor, layer: int) -> Tensor:
        ctx.save_for_backward(vector, torch.ops.proxpo.begin(x.detach(), layer))
        ctx.layer = layer
        return vector.expand(*x.shape[:-1], vector.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)[0], None, None


linear, embedding, expand = _Linear.apply, _Embedding.apply, _Expand.apply
