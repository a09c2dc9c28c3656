"""Autograd functions whose parameter gradients are already transformed.

Each saves what the ordinary operation saves, hands the ordinary gradient to its input, and returns
the transformed gradient for its parameters. Nothing is cloned, and a checkpointed segment that
runs again simply runs them again.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.gradients._engine import compiled
from proxpo.gradients._engine.device import accumulator
from proxpo.gradients._engine.position_axes import broadcast, flatten_positions, position_axes
from proxpo.gradients._engine.position_gradients import (
    AnyGradients,
    Dense,
    OneHot,
    Outer,
    SharedInput,
)
from proxpo.gradients._engine.session import Call, ModuleHandle, Session
from proxpo.ops.shapes import Float, Int, Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


def autocast(x: Tensor) -> Tensor:
    """Casts the operand of a matrix product as autocast does."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return x
    kind = x.device.type
    wanted = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if wanted else x


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Context without autocast, where it is on."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def _returned(
    module_handle: ModuleHandle, attribute: str, gradient: Tensor | None, kind: torch.dtype
) -> Any:
    """The gradient to return to autograd, in the parameter's dtype; None while calls are open."""
    if gradient is None:
        return None
    gradient = gradient if gradient.dtype == kind else gradient.to(kind)
    return module_handle.handles[attribute].send(gradient)


def _without_base(out: Tensor) -> Tensor:
    """The tensor, not as a view of another: autograd lets nobody change views in place."""
    base = out._base
    if base is None:
        return out
    if base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous():
        return torch.ops.aten._unsafe_view(base, out.shape)
    return out.clone()


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, at no cost where no second derivative is asked for."""
    refusing = once_differentiable(backward)

    def run(ctx: Any, *grads: Tensor) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


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
        ctx.layer, ctx.call = layer, _begin(layer.module_handle, x.shape[:-1])
        ctx.inputs = inputs
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        with no_autocast(x):
            kernel = layer.kernel(weight, x.dtype)
            ctx.save_for_backward(x, weight, None if kernel.dtype == weight.dtype else kernel)
            if bias is not None and bias.dtype != x.dtype:
                bias = bias.to(x.dtype)
            out = F.linear(x, kernel.T if layer.transposed else kernel, bias)
        return out if out._base is None else _without_base(out)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: LinearLayer = ctx.layer
        needs = ctx.needs_input_grad
        x, weight, kernel = ctx.saved_tensors
        made = layer.backward(
            ctx.call, grad, x, weight, ctx.bias_dtype, needs, ctx.inputs, kernel=kernel
        )
        return *made, None, None


def _flatten(x: Tensor, module_handle: ModuleHandle) -> Tensor:
    """(..., D) -> (positions x extra, D), positions first."""
    shape = module_handle.session.shape
    if x.shape[:-1] == shape:
        return x.reshape(-1, x.shape[-1])
    return flatten_positions(x, shape, module_handle.name)[0]


def _begin(module_handle: ModuleHandle, lead: tuple[int, ...]) -> Call:
    """Registers a call of a module whose input has these leading axes."""
    layout, shape = module_handle.session.layout, module_handle.session.shape
    if lead != shape:
        position_axes(lead, shape, module_handle.name)
        layout = layout.repeat(math.prod(lead) // layout.size)
    return module_handle.begin(layout)


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
            x, inputs = self.session.shared_input(x, autocast, self.module_handle, self.weight)
            return _Linear.apply(x, weight, bias, self, inputs)
        x = broadcast(autocast(x), self.session.shape, 1)
        if (not x.requires_grad or _is_constant(x)) and not shows_positions(self.session, x):
            return _ConstantInput.apply(x, weight, bias, self)
        return _Linear.apply(x, weight, bias, self, None)

    def begin(self, x: Tensor) -> Call | None:
        """Registers a call of a compiled model; None for an input that is a constant."""
        return (
            _begin(self.module_handle, x.shape[:-1]) if shows_positions(self.session, x) else None
        )

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
            a, g = _flatten(x, module_handle), _flatten(grad, module_handle)
            rows: dict[str, AnyGradients] = {}
            if needs[1]:
                rows[self.weight] = self.rows(a, g, weight, inputs)
            if needs[2]:
                rows[self.bias] = Dense(g)
            out = module_handle.finish(call, rows) if rows else {}
            return (
                grad_x,
                _returned(module_handle, self.weight, out.get(self.weight), weight.dtype),
                _returned(module_handle, self.bias, out.get(self.bias), bias_dtype),
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
    @_once
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
    @_once
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
        return _begin(self.module_handle, x.shape[:-1])

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
        flat = _flatten(ids[..., None], module_handle)[:, 0]
        rows = OneHot(flat, _flatten(grad, module_handle), size, self.padding)
        with no_autocast(grad):
            out = module_handle.finish(call, {self.weight: rows}).get(self.weight)
        return _returned(module_handle, self.weight, out, kind)


class _Expand(torch.autograd.Function):
    """A vector repeated for every position (a view), so that each position's gradient arrives."""

    @staticmethod
    def forward(
        ctx: Any, vector: Tensor, lead: tuple[int, ...], attribute: str, vectors: "VectorCall"
    ) -> Tensor:
        ctx.attribute, ctx.vectors, ctx.dtype = attribute, vectors, vector.dtype
        return vector.expand(*lead, vector.shape[-1])

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.vectors.finish(ctx.attribute, grad, ctx.dtype), None, None, None


class _NormWeight(torch.autograd.Function):
    """The output of an RMS norm, beside which the weight gets the gradient of each position.

    x̂ is computed again: cheaper than a product with the weight at every position, both ways.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        x: Tensor,
        eps: float,
        attribute: str,
        vectors: "VectorCall",
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps, ctx.attribute, ctx.vectors, ctx.dtype = eps, attribute, vectors, weight.dtype
        return y.view_as(y)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = F.rms_norm(x, x.shape[-1:], None, ctx.eps) * grad
        out = ctx.vectors.finish(ctx.attribute, rows, ctx.dtype)
        return grad, out, None, None, None, None


def norm_weight(
    y: Tensor, weight: Tensor, x: Tensor, eps: float, attribute: str, vectors: "VectorCall"
) -> Tensor:
    """y, the RMS norm of x times `weight`, with a gradient of the weight by position."""
    return _NormWeight.apply(y, weight, x, eps, attribute, vectors)


class VectorCall:
    """The vectors of one module in one call: a list of positions for each."""

    __slots__ = ("calls", "module_handles", "session")

    def __init__(
        self, session: Session, module_handles: dict[str, ModuleHandle], lead: tuple[int, ...]
    ) -> None:
        self.session = session
        self.module_handles = module_handles
        if lead != session.shape:  # refuse now rather than in the backward pass
            position_axes(lead, session.shape, next(iter(module_handles.values())).name)
        self.calls = {
            name: module_handle.begin(session.layout)
            for name, module_handle in module_handles.items()
        }

    def finish(self, attribute: str, grad: Tensor, kind: torch.dtype) -> Tensor | None:
        module_handle = self.module_handles[attribute]
        with no_autocast(grad):
            rows = Dense(rows_by_position(grad, self.session, module_handle))
            out = module_handle.finish(self.calls[attribute], {attribute: rows}).get(attribute)
        return _returned(module_handle, attribute, out, kind)


def rows_by_position(
    grad: Tensor, session: Session, module_handle: ModuleHandle
) -> Float[Tensor, "pos out"]:
    """The gradient with one row per position: the rows of its heads added up."""
    if grad.shape[:-1] == session.shape:
        return grad.reshape(-1, grad.shape[-1])
    flat, extra = flatten_positions(grad, session.shape, module_handle.name)
    if extra == 1:
        return flat
    return flat.view(-1, extra, flat.shape[-1]).sum(1, dtype=accumulator(flat.dtype))


def shows_positions(session: Session, *args: Any, **kwargs: Any) -> bool:
    """True where the leading axes of a module's first input show the positions."""
    x = next(iter((*args, *kwargs.values())))
    try:
        position_axes(tuple(x.shape[:-1]), session.shape, "")
    except ProxpoError:
        return False
    return True


class VectorLayer:
    """A vector of a module in a compiled model."""

    def __init__(self, session: Session, module_handle: ModuleHandle, attribute: str) -> None:
        self.session = session
        self.module_handle = module_handle
        self.attribute = attribute
        self.number = compiled.numbered(self)

    def begin(self, x: Tensor) -> VectorCall:
        """Registers a call with the input x."""
        return VectorCall(self.session, {self.attribute: self.module_handle}, x.shape[:-1])

    def gradients(
        self, call: VectorCall, grad: Tensor, saved: list[Tensor], needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradient of the vector."""
        return (call.finish(self.attribute, grad, saved[0].dtype),)


def expand(vector: Tensor, lead: tuple[int, ...], attribute: str, vectors: VectorCall) -> Tensor:
    """A vector repeated for every position."""
    return _Expand.apply(vector, lead, attribute, vectors)


class _Norm(torch.autograd.Function):
    """y = normalise(x) w + b with the fused operation's own forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: "NormCall"
    ) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        return norm.apply(x, weight, bias)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        norm: NormCall = ctx.norm
        with no_autocast(x):
            hat, grad_x = norm.derivative(x, (grad * weight).to(x.dtype))
        out: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            out[0] = norm.vectors.finish("weight", grad * hat, weight.dtype)
        if ctx.needs_input_grad[2]:
            out[1] = norm.vectors.finish("bias", grad, ctx.bias_dtype)
        return (grad_x if ctx.needs_input_grad[0] else None), *out, None


Derivative = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def layer_norm_derivative(x: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised x̂, and grad pulled back through it."""
    shape = x.shape[-1:]
    hat, mean, rstd = torch.native_layer_norm(x, shape, None, None, eps)
    grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, shape, mean, rstd, None, None, [True, False, False]
    )
    return hat, grad_x


def rms_norm_derivative(x: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x̂ = x/ρ, ρ² = mean x² + ε, and (grad - x̂ mean(grad x̂)) / ρ."""
    kind = accumulator(x.dtype)
    high = x if x.dtype == kind else x.to(kind)
    rstd = high.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    hat = high * rstd
    inner = (hat * grad).mean(-1, keepdim=True)
    grad_x = torch.addcmul(grad.to(kind), hat, inner, value=-1).mul_(rstd)
    return hat.to(x.dtype), grad_x.to(x.dtype)


class NormCall:
    """F.layer_norm or F.rms_norm under a session, for one call."""

    def __init__(
        self, apply: Callable[..., Tensor], derivative: Derivative, vectors: VectorCall
    ) -> None:
        """`derivative`: of the norm without weight and bias, as `layer_norm_derivative`."""
        self.apply = apply
        self.derivative = derivative
        self.vectors = vectors

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Norm.apply(x, weight, bias, self)
