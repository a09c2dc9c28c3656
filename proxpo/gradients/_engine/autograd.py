"""Autograd functions whose parameter gradients are already transformed.

Each saves what the ordinary operation saves, hands the ordinary gradient to its input, and returns
the transformed gradient for its parameters. Nothing is cloned, and a checkpointed segment that
runs again simply runs them again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.device import accumulator
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.position_axes import broadcast, flatten_positions, position_axes
from proxpo.gradients._engine.position_gradients import AnyGradients, Dense, OneHot, Outer
from proxpo.gradients._engine.session import ModuleHandle, Session
from proxpo.ops.shapes import Float, Int, Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


def autocast(x: Tensor) -> Tensor:
    """Casts the operand of a matrix product as autocast does."""
    kind = x.device.type
    wanted = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if wanted else x


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Context without autocast, where it is on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def _returned(
    module_handle: ModuleHandle, attribute: str, gradient: Tensor | None, kind: torch.dtype
) -> Any:
    """The gradient to return to autograd, in the parameter's dtype; None while calls are open."""
    return None if gradient is None else module_handle.handles[attribute].send(gradient.to(kind))


def _without_base(out: Tensor) -> Tensor:
    """The tensor, not as a view of another: autograd lets nobody change views in place."""
    base = out._base
    if base is None:
        return out
    if base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous():
        return torch.ops.aten._unsafe_view(base, out.shape)
    return out.clone()


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, W of shape O x D (or D x O when `transposed`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "LinearLayer"
    ) -> Tensor:
        ctx.layer, ctx.call = layer, layer.module_handle.begin(layer.layout_of(x))
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        with no_autocast(x):
            kernel = layer.kernel(weight).to(x.dtype)
            out = F.linear(
                x,
                kernel.T if layer.transposed else kernel,
                None if bias is None else bias.to(x.dtype),
            )
        return _without_base(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: LinearLayer = ctx.layer
        with no_autocast(x):
            kernel = layer.kernel(weight).to(x.dtype)
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = F.linear(grad, kernel if layer.transposed else kernel.T)
            a, g = layer.flatten(x), layer.flatten(grad)
            rows: dict[str, AnyGradients] = {}
            if ctx.needs_input_grad[1]:
                rows[layer.weight] = layer.rows(a, g, weight)
            if ctx.needs_input_grad[2]:
                rows[layer.bias] = Dense(g)
            out = layer.module_handle.finish(ctx.call, rows) if rows else {}
            module_handle = layer.module_handle
            return (
                grad_x,
                _returned(module_handle, layer.weight, out.get(layer.weight), weight.dtype),
                _returned(module_handle, layer.bias, out.get(layer.bias), ctx.bias_dtype),
                None,
            )


class LinearLayer:
    """A linear layer, or an embedding, under a session."""

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

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = broadcast(autocast(x), self.session.shape, 1)
        if (not x.requires_grad or _is_constant(x)) and not shows_positions(self.session, x):
            return _ConstantInput.apply(x, weight, bias, self)
        return _Linear.apply(x, weight, bias, self)

    def kernel(self, weight: Tensor) -> Tensor:
        return weight if self.part is None else weight[self.part]

    def rows(self, a: Tensor, g: Tensor, weight: Tensor) -> Outer:
        """Position gradients of the whole parameter, 0 outside the part."""
        if self.transposed:
            a, g = g, a
        if self.part is not None:
            g, a = (_widened(x, p, n) for x, p, n in zip((g, a), self.part, weight.shape))
        return Outer(a, g)

    def flatten(self, x: Tensor) -> Tensor:
        return flatten_positions(x, self.session.shape, self.module_handle.name)[0]

    def layout_of(self, x: Tensor) -> Layout:
        if tuple(x.shape[:-1]) == self.session.shape:
            return self.session.layout
        extra = x[..., 0].numel() // self.session.layout.size
        position_axes(tuple(x.shape[:-1]), self.session.shape, self.module_handle.name)
        return self.session.layout.repeat(extra)


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
            kernel = layer.kernel(weight).to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            return F.linear(x, kernel.T if layer.transposed else kernel, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ProxpoError(
            f"gradients.applied: {ctx.layer.module_handle.name} is applied to a constant of shape "
            f"{ctx.shape}, not to the positions of `sequences`, of shape "
            f"{ctx.layer.session.shape}: its gradient belongs to no sequence"
        )


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
        ctx: Any, ids: Int[Tensor, "..."], weight: Tensor, padding: int, layer: LinearLayer
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer, ctx.call = layer, layer.module_handle.begin(layer.layout_of(ids[..., None]))
        ctx.size, ctx.padding, ctx.dtype = weight.shape[0], padding, weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        layer: LinearLayer = ctx.layer
        flat = layer.flatten(ids[..., None])[:, 0]
        rows = OneHot(flat, layer.flatten(grad), ctx.size, ctx.padding)
        with no_autocast(grad):
            out = layer.module_handle.finish(ctx.call, {layer.weight: rows}).get(layer.weight)
        return None, _returned(layer.module_handle, layer.weight, out, ctx.dtype), None, None


def embedding(
    layer: LinearLayer, ids: Int[Tensor, "..."], weight: Tensor, padding: int | None
) -> Tensor:
    """Rows of an embedding: a linear layer whose input is one-hot."""
    ids = broadcast(ids, layer.session.shape, 0)
    return _Embedding.apply(ids, weight, -1 if padding is None else padding, layer)


class _Expand(torch.autograd.Function):
    """A vector repeated for every position (a view), so that each position's gradient arrives."""

    @staticmethod
    def forward(
        ctx: Any, vector: Tensor, lead: tuple[int, ...], attribute: str, vectors: "VectorCall"
    ) -> Tensor:
        ctx.attribute, ctx.vectors, ctx.dtype = attribute, vectors, vector.dtype
        return vector.expand(*lead, vector.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.vectors.finish(ctx.attribute, grad, ctx.dtype), None, None, None


class VectorCall:
    """The vectors of one module in one call: a list of positions for each."""

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
            rows = Dense(rows_by_position(grad, self.session, module_handle.name))
            out = module_handle.finish(self.calls[attribute], {attribute: rows}).get(attribute)
        return _returned(module_handle, attribute, out, kind)


def rows_by_position(grad: Tensor, session: Session, where: str) -> Float[Tensor, "pos out"]:
    """The gradient with one row per position: the rows of its heads added up."""
    flat, extra = flatten_positions(grad, session.shape, where)
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        norm: NormCall = ctx.norm
        with no_autocast(x), torch.enable_grad():
            source = x.detach().requires_grad_()
            hat = norm.apply(source, None, None)
        grad_x = None
        if ctx.needs_input_grad[0]:
            (grad_x,) = torch.autograd.grad(hat, source, (grad * weight).to(hat.dtype))
        out: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            out[0] = norm.vectors.finish("weight", grad * hat.detach(), weight.dtype)
        if ctx.needs_input_grad[2]:
            out[1] = norm.vectors.finish("bias", grad, ctx.bias_dtype)
        return grad_x, *out, None


class NormCall:
    """F.layer_norm or F.rms_norm under a session, for one call."""

    def __init__(self, apply: Callable[..., Tensor], vectors: VectorCall) -> None:
        self.apply = apply
        self.vectors = vectors

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Norm.apply(x, weight, bias, self)
