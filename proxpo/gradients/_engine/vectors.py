"""Vectors and norms whose parameter gradients are already transformed, as in `matrices`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from proxpo.gradients._engine import compiled
from proxpo.gradients._engine.device import accumulator
from proxpo.gradients._engine.operations import no_autocast, once, returned
from proxpo.gradients._engine.position_axes import flatten_positions, position_axes
from proxpo.gradients._engine.position_gradients import Dense
from proxpo.gradients._engine.session import ModuleHandle, Session
from proxpo.ops.shapes import Float, Tensor


class _Expand(torch.autograd.Function):
    """A vector repeated for every position (a view), so that each position's gradient arrives."""

    @staticmethod
    def forward(
        ctx: Any, vector: Tensor, lead: tuple[int, ...], attribute: str, vectors: "VectorCall"
    ) -> Tensor:
        ctx.attribute, ctx.vectors, ctx.dtype = attribute, vectors, vector.dtype
        return vector.expand(*lead, vector.shape[-1])

    @staticmethod
    @once
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
    @once
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
        return returned(module_handle, attribute, out, kind)


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
    @once
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
