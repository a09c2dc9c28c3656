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
from proxpo.gradients import _place
from proxpo.gradients._layout import Layout, accumulator
from proxpo.gradients._rows import Dense, OneHot, Outer
from proxpo.gradients._session import AnyRows, Session, Unit
from proxpo.ops.shapes import Float, Int, Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


def _autocast(x: Tensor) -> Tensor:
    """What autocast does to the operand of a matrix product."""
    kind = x.device.type
    wanted = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if wanted else x


def _no_autocast(x: Tensor) -> AbstractContextManager[None]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def _handed(unit: Unit, attribute: str, gradient: Tensor | None, kind: torch.dtype) -> Any:
    """A gradient on its way to autograd, in the parameter's dtype; None while calls are open."""
    return None if gradient is None else unit.sites[attribute].send(gradient.to(kind))


def _unviewed(out: Tensor) -> Tensor:
    """The same tensor, not as a view of another: autograd lets nobody change views in place."""
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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "Linear"
    ) -> Tensor:
        ctx.layer, ctx.call = layer, layer.unit.begin(layer.layout_of(x))
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        with _no_autocast(x):
            kernel = layer.kernel(weight).to(x.dtype)
            out = F.linear(
                x,
                kernel.T if layer.transposed else kernel,
                None if bias is None else bias.to(x.dtype),
            )
        return _unviewed(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: Linear = ctx.layer
        with _no_autocast(x):
            kernel = layer.kernel(weight).to(x.dtype)
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = F.linear(grad, kernel if layer.transposed else kernel.T)
            a, g = layer.flatten(x), layer.flatten(grad)
            rows: dict[str, AnyRows] = {}
            if ctx.needs_input_grad[1]:
                rows[layer.weight] = layer.rows(a, g, weight)
            if ctx.needs_input_grad[2]:
                rows[layer.bias] = Dense(g)
            out = layer.unit.finish(ctx.call, rows) if rows else {}
            unit = layer.unit
            return (
                grad_x,
                _handed(unit, layer.weight, out.get(layer.weight), weight.dtype),
                _handed(unit, layer.bias, out.get(layer.bias), ctx.bias_dtype),
                None,
            )


class Linear:
    """A linear layer under a session."""

    def __init__(
        self,
        session: Session,
        unit: Unit,
        *,
        transposed: bool = False,
        weight: str = "weight",
        part: tuple[slice, slice] | None = None,
    ) -> None:
        """`part`: the rows and columns of the parameter that the layer multiplies by."""
        self.session = session
        self.unit = unit
        self.transposed = transposed
        self.weight, self.bias = weight, "bias"
        self.part = part

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = _place.broadcast(_autocast(x), self.session.shape, 1)
        if (not x.requires_grad or _apart(x)) and not placed(self.session, x):
            return _Apart.apply(x, weight, bias, self)
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
        return _place.flatten(x, self.session.shape, self.unit.name)[0]

    def layout_of(self, x: Tensor) -> Layout:
        if tuple(x.shape[:-1]) == self.session.shape:
            return self.session.layout
        extra = x[..., 0].numel() // self.session.layout.size
        _place.axes(tuple(x.shape[:-1]), self.session.shape, self.unit.name)
        return self.session.layout.repeat(extra)


class _Apart(torch.autograd.Function):
    """A linear layer applied to a constant that is no activation: DoRA does so for a norm.

    Its value is used; a gradient would belong to no sequence.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        ctx.layer, ctx.shape = layer, tuple(x.shape)
        with _no_autocast(x):
            kernel = layer.kernel(weight).to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            return F.linear(x, kernel.T if layer.transposed else kernel, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ProxpoError(
            f"gradients.applied: {ctx.layer.unit.name} is applied to a constant of shape "
            f"{ctx.shape}, not to the positions of `sequences`, of shape "
            f"{ctx.layer.session.shape}: its gradient belongs to no sequence"
        )


def _apart(x: Tensor) -> bool:
    return isinstance(x.grad_fn, _Apart._backward_cls)  # type: ignore[attr-defined]


def _widened(x: Float[Tensor, "pos some"], part: slice, width: int) -> Float[Tensor, "pos all"]:
    """Columns `part` of a matrix that is 0 elsewhere."""
    return F.pad(x, (part.start, width - part.stop))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Int[Tensor, "..."], weight: Tensor, padding: int, layer: Linear
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer, ctx.call = layer, layer.unit.begin(layer.layout_of(ids[..., None]))
        ctx.size, ctx.padding, ctx.dtype = weight.shape[0], padding, weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        layer: Linear = ctx.layer
        flat = layer.flatten(ids[..., None])[:, 0]
        rows = OneHot(flat, layer.flatten(grad), ctx.size, ctx.padding)
        with _no_autocast(grad):
            out = layer.unit.finish(ctx.call, {layer.weight: rows}).get(layer.weight)
        return None, _handed(layer.unit, layer.weight, out, ctx.dtype), None, None


def embedding(
    layer: Linear, ids: Int[Tensor, "..."], weight: Tensor, padding: int | None
) -> Tensor:
    """Rows of an embedding: a linear layer whose input is one-hot."""
    ids = _place.broadcast(ids, layer.session.shape, 0)
    return _Embedding.apply(ids, weight, -1 if padding is None else padding, layer)


class _Expand(torch.autograd.Function):
    """A vector repeated for every position (a view), so that each position's gradient arrives."""

    @staticmethod
    def forward(
        ctx: Any, vector: Tensor, lead: tuple[int, ...], attribute: str, shared: "Shared"
    ) -> Tensor:
        ctx.attribute, ctx.shared, ctx.dtype = attribute, shared, vector.dtype
        return vector.expand(*lead, vector.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.shared.finish(ctx.attribute, grad, ctx.dtype), None, None, None


class Shared:
    """The vectors of one module in one call: a list of positions of its own for each."""

    def __init__(self, session: Session, units: dict[str, Unit], lead: tuple[int, ...]) -> None:
        self.session = session
        self.units = units
        if lead != session.shape:  # refuse now rather than in the backward pass
            _place.axes(lead, session.shape, next(iter(units.values())).name)
        self.calls = {name: unit.begin(session.layout) for name, unit in units.items()}

    def finish(self, attribute: str, grad: Tensor, kind: torch.dtype) -> Tensor | None:
        unit = self.units[attribute]
        with _no_autocast(grad):
            rows = Dense(positions(grad, self.session, unit.name))
            out = unit.finish(self.calls[attribute], {attribute: rows}).get(attribute)
        return _handed(unit, attribute, out, kind)


def positions(grad: Tensor, session: Session, where: str) -> Float[Tensor, "pos out"]:
    """One row per position: the rows of its heads added up."""
    flat, extra = _place.flatten(grad, session.shape, where)
    if extra == 1:
        return flat
    return flat.view(-1, extra, flat.shape[-1]).sum(1, dtype=accumulator(flat.dtype))


def placed(session: Session, *args: Any, **kwargs: Any) -> bool:
    """Whether the leading axes of a module's first input show the positions."""
    x = next(iter((*args, *kwargs.values())))
    try:
        _place.axes(tuple(x.shape[:-1]), session.shape, "")
    except ProxpoError:
        return False
    return True


def expand(vector: Tensor, lead: tuple[int, ...], attribute: str, shared: Shared) -> Tensor:
    return _Expand.apply(vector, lead, attribute, shared)


class _Norm(torch.autograd.Function):
    """y = normalise(x) w + b with the fused operation's own forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: "Norm") -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
        return norm.apply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        norm: Norm = ctx.norm
        with _no_autocast(x), torch.enable_grad():
            source = x.detach().requires_grad_()
            hat = norm.apply(source, None, None)
        grad_x = None
        if ctx.needs_input_grad[0]:
            (grad_x,) = torch.autograd.grad(hat, source, (grad * weight).to(hat.dtype))
        out: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[1]:
            out[0] = norm.shared.finish("weight", grad * hat.detach(), weight.dtype)
        if ctx.needs_input_grad[2]:
            out[1] = norm.shared.finish("bias", grad, ctx.bias_dtype)
        return grad_x, *out, None


class Norm:
    """F.layer_norm or F.rms_norm under a session, for one call."""

    def __init__(self, apply: Callable[..., Tensor], shared: Shared) -> None:
        self.apply = apply
        self.shared = shared

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Norm.apply(x, weight, bias, self)
