"""Linear layers and embeddings whose parameter gradients are already transformed.

Each autograd function saves what the ordinary operation saves, hands the ordinary gradient to its
input, and returns the transformed gradient for its parameters. Nothing is cloned, and a
checkpointed segment that runs again simply runs them again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from proxpo.errors import ProxpoError
from proxpo.gradients._engine import compiled
from proxpo.gradients._engine.operations import (
    autocast,
    begin_call,
    flat_positions,
    linear,
    no_autocast,
    once,
    returned,
    shows_positions,
)
from proxpo.gradients._engine.position_axes import broadcast
from proxpo.gradients._engine.position_gradients import (
    AnyGradients,
    Dense,
    OneHot,
    Outer,
    SharedInput,
)
from proxpo.gradients._engine.session import Call, ModuleHandle, Session
from proxpo.ops.shapes import Float, Int, Tensor


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, W of shape O x D (or D x O when `transposed`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "LinearLayer",
        inputs: SharedInput | None,
    ) -> Tensor:
        ctx.layer, ctx.call = layer, begin_call(layer.module_handle, x.shape[:-1])
        ctx.inputs = inputs
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        with no_autocast(x):
            kernel = layer.kernel(weight, x.dtype)
            ctx.save_for_backward(x, weight, None if kernel.dtype == weight.dtype else kernel)
            if bias is not None and bias.dtype != x.dtype:
                bias = bias.to(x.dtype)
            return linear(x, kernel.T if layer.transposed else kernel, bias)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearLayer = ctx.layer
        needs = ctx.needs_input_grad
        x, weight, kernel = ctx.saved_tensors
        made = layer.backward(
            ctx.call, grad, x, weight, ctx.bias_dtype, needs, ctx.inputs, kernel=kernel
        )
        return *made, None, None


class LinearLayer:
    """A linear layer under a session."""

    def __init__(
        self,
        session: Session,
        module_handle: ModuleHandle,
        *,
        transposed: bool = False,
        weight: str = "weight",
        part: tuple[slice, slice] | None = None,
    ) -> None:
        """`part`: the rows and columns of the parameter that the layer multiplies by."""
        self.session = session
        self.module_handle = module_handle
        self.transposed = transposed
        self.weight, self.bias = weight, "bias"
        self.part = part
        self.number = -1  # in a compiled model

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            x = broadcast(autocast(x), self.session.shape, 1)
            return compiled.linear(x, weight, bias, self.transposed, self.number)
        if x.shape[:-1] == self.session.shape:
            x, inputs = self._cast(x)
            return _Linear.apply(x, weight, bias, self, inputs)
        x = broadcast(autocast(x), self.session.shape, 1)
        if (not x.requires_grad or _is_constant(x)) and not shows_positions(self.session, x):
            return _ConstantInput.apply(x, weight, bias, self)
        return _Linear.apply(x, weight, bias, self, None)

    def _cast(self, x: Tensor) -> tuple[Tensor, SharedInput | None]:
        """The input as autocast casts it; the layers before may have had the same."""
        handle = self.module_handle.handles.get(self.weight)
        if handle is None:
            return autocast(x), None
        return self.session.last_input.cast(x, autocast, self.module_handle, handle)

    def begin(self, x: Tensor) -> Call | None:
        """Registers a call of a compiled model; None for an input that is a constant."""
        if not shows_positions(self.session, x):
            return None
        return begin_call(self.module_handle, x.shape[:-1])

    def gradients(
        self, call: Call | None, grad: Tensor, saved: list[Tensor], needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias in a compiled model."""
        x, weight, *bias = saved
        if call is None:
            raise self.refusal(tuple(x.shape))
        kind = bias[0].dtype if bias else weight.dtype
        return self.backward(call, grad, x, weight, kind, (*needs, False), None)

    def backward(
        self,
        call: Call,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias_dtype: torch.dtype,
        needs: Sequence[bool],
        inputs: SharedInput | None,
        kernel: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias, where `needs` asks for them.

        kernel: the weight in the dtype of x, where the forward pass has cast it
        """
        module_handle = self.module_handle
        with no_autocast(x):
            grad_x = None
            if needs[0]:
                kernel = self.kernel(weight, x.dtype) if kernel is None else kernel
                grad_x = F.linear(grad, kernel if self.transposed else kernel.T)
            a, g = flat_positions(x, module_handle), flat_positions(grad, module_handle)
            rows: dict[str, AnyGradients] = {}
            if needs[1]:
                rows[self.weight] = self.rows(a, g, weight, inputs)
            if needs[2]:
                rows[self.bias] = Dense(g)
            out = module_handle.finish(call, rows) if rows else {}
            return (
                grad_x,
                returned(module_handle, self.weight, out.get(self.weight), weight.dtype),
                returned(module_handle, self.bias, out.get(self.bias), bias_dtype),
            )

    def refusal(self, shape: tuple[int, ...]) -> ProxpoError:
        """The error for the gradient of a constant."""
        return ProxpoError(
            f"gradients.applied: {self.module_handle.name} is applied to a constant of shape "
            f"{shape}, not to the positions of `sequences`, of shape {self.session.shape}: its "
            "gradient belongs to no sequence"
        )

    def kernel(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrix that the layer multiplies by."""
        part = weight if self.part is None else weight[self.part]
        return part if part.dtype == dtype else part.to(dtype)

    def rows(self, a: Tensor, g: Tensor, weight: Tensor, inputs: SharedInput | None) -> Outer:
        """Position gradients of the whole parameter, 0 outside the part."""
        if not self.transposed and self.part is None:
            return Outer(a, g, inputs)
        if self.transposed:
            a, g = g, a
        if self.part is not None:
            g, a = (_widened(x, p, n) for x, p, n in zip((g, a), self.part, weight.shape))
        return Outer(a, g)


class _ConstantInput(torch.autograd.Function):
    """A linear layer applied to a constant that is no activation: DoRA does so for a norm.

    Its value is used; a gradient would belong to no sequence.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearLayer
    ) -> Tensor:
        ctx.layer, ctx.shape = layer, tuple(x.shape)
        with no_autocast(x):
            kernel = layer.kernel(weight, x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            return F.linear(x, kernel.T if layer.transposed else kernel, bias)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.layer.refusal(ctx.shape)


def _is_constant(x: Tensor) -> bool:
    """True for the output of a layer that was applied to a constant."""
    return isinstance(x.grad_fn, _ConstantInput._backward_cls)  # type: ignore[attr-defined]


def _widened(x: Float[Tensor, "pos some"], part: slice, width: int) -> Float[Tensor, "pos all"]:
    """Columns `part` of a matrix that is 0 elsewhere."""
    return F.pad(x, (part.start, width - part.stop))


class _Embedding(torch.autograd.Function):
    """Rows of an embedding."""

    @staticmethod
    def forward(
        ctx: Any, ids: Int[Tensor, "..."], weight: Tensor, layer: "EmbeddingLayer"
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer, ctx.call = layer, layer.begin(ids[..., None])
        ctx.size, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        layer: EmbeddingLayer = ctx.layer
        return None, layer.backward(ctx.call, grad, ids, ctx.size, ctx.dtype), None


class EmbeddingLayer:
    """An embedding under a session: a linear layer whose input is one-hot."""

    def __init__(
        self, session: Session, module_handle: ModuleHandle, weight: str, padding: int | None
    ) -> None:
        self.session = session
        self.module_handle = module_handle
        self.weight = weight
        self.padding = -1 if padding is None else padding
        self.number = -1  # in a compiled model

    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor:
        ids = broadcast(ids, self.session.shape, 0)
        if torch.compiler.is_compiling():
            return compiled.embedding(weight, ids, self.number)
        return _Embedding.apply(ids, weight, self)

    def begin(self, x: Tensor) -> Call:
        """Registers a call; x: the token numbers with a last axis of 1."""
        return begin_call(self.module_handle, x.shape[:-1])

    def gradients(
        self, call: Call, grad: Tensor, saved: list[Tensor], needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradient of the weight in a compiled model."""
        weight, ids = saved
        return self.backward(call, grad, ids, len(weight), weight.dtype), None

    def backward(
        self, call: Call, grad: Tensor, ids: Int[Tensor, "..."], size: int, kind: torch.dtype
    ) -> Tensor | None:
        """Gradient of the weight, of `size` rows."""
        module_handle = self.module_handle
        flat = flat_positions(ids[..., None], module_handle)[:, 0]
        rows = OneHot(flat, flat_positions(grad, module_handle), size, self.padding)
        with no_autocast(grad):
            out = module_handle.finish(call, {self.weight: rows}).get(self.weight)
        return returned(module_handle, self.weight, out, kind)
