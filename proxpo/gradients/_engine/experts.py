"""Banks of experts: 3-D weights, one slice per expert, each a layer with its routed positions."""

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.layout import Layout
from proxpo.gradients._engine.module import Forward, TrainedModule
from proxpo.gradients._engine.operations import autocast, no_autocast
from proxpo.gradients._engine.position_gradients import AnyGradients, Dense, Outer
from proxpo.gradients._engine.session import ModuleHandle, Session
from proxpo.ops.shapes import Int, Tensor

_MARKS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


def recognised(module: nn.Module) -> bool:
    """True for a bank of two-layer experts in the layout that transformers gives them."""
    return all(hasattr(module, mark) for mark in _MARKS)


def bank(target: TrainedModule) -> Forward:
    """Σ over a token's experts of weight · down(act(up(x))), one layer per expert and matrix."""
    module, session = target.module, target.session
    first = "gate_up_proj" if module.has_gate else "up_proj"
    slices = {own: _slices(target, own) for own in target.names}

    def forward(
        hidden_states: Tensor, top_k_index: Int[Tensor, "pos k"], top_k_weights: Tensor
    ) -> Tensor:
        routes = _routes(session, target.name, top_k_index, module.num_experts)
        x = autocast(hidden_states)[routes.position]
        up = routes.linear(module, first, slices, x)
        inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        down = routes.linear(module, "down_proj", slices, inner)
        weights = top_k_weights.reshape(-1)[routes.order].to(down.dtype)
        out = torch.zeros_like(hidden_states, dtype=down.dtype)
        out = out.index_add(0, routes.position, down * weights[:, None])
        return out.to(hidden_states.dtype)

    return forward


def _slices(target: TrainedModule, own: str) -> list[ModuleHandle]:
    """One module handle per expert: every expert has its own lengths and averages."""
    add = functools.partial(target.session.add, target.module, draws=False)
    return [add(f"{target.name}.{number}", [own]) for number in range(target.module.num_experts)]


def _routes(session: Session, name: str, experts: Int[Tensor, "pos k"], count: int) -> "_Routes":
    """The routes of a forward, sorted by expert."""
    flat = experts.reshape(-1)
    if experts.shape[0] != session.layout.size:
        raise ProxpoError(
            f"gradients.applied: {name} routes {experts.shape[0]} positions, but `sequences` has "
            f"{session.layout.size}; let every layer see all positions"
        )
    order = torch.argsort(flat, stable=True)
    position = order.div(experts.shape[1], rounding_mode="floor")
    sizes = torch.bincount(flat, minlength=count).tolist()
    layouts = session.layout.routed(experts, order, sizes)
    return _Routes(order, position, sizes, layouts)


class _Routes:
    """Pairs of (position, expert), sorted by expert."""

    def __init__(
        self, order: Tensor, position: Tensor, sizes: list[int], layouts: list[Layout]
    ) -> None:
        self.order, self.position, self.sizes, self.layouts = order, position, sizes, layouts

    def linear(
        self, module: Any, own: str, slices: dict[str, list[ModuleHandle]], x: Tensor
    ) -> Tensor:
        bias = getattr(module, f"{own}_bias") if module.has_bias else None
        module_handles = slices.get(own), slices.get(f"{own}_bias")
        return _Grouped.apply(
            x, getattr(module, own), bias, self, module.is_transposed, module_handles
        )


class _Grouped(torch.autograd.Function):
    """y_t = x_t W_eᵀ + b_e for rows sorted by expert e."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        routes: _Routes,
        transposed: bool,
        module_handles: tuple[list[ModuleHandle] | None, list[ModuleHandle] | None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.routes, ctx.transposed, ctx.module_handles = routes, transposed, module_handles
        ctx.calls = [
            None if bank is None else [u.begin(part) for u, part in zip(bank, routes.layouts)]
            for bank in module_handles
        ]
        parts = []
        with no_autocast(x):
            for expert, rows in enumerate(x.split(routes.sizes)):
                kernel = weight[expert].to(x.dtype)
                part = rows @ (kernel if transposed else kernel.T)
                parts.append(part if bias is None else part + bias[expert].to(x.dtype))
            return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        out: list[Tensor | None] = [None, None]
        for place, parameter in enumerate((weight, bias)):
            if ctx.needs_input_grad[1 + place]:
                out[place] = torch.zeros_like(parameter)
        grad_x = []
        with no_autocast(x):
            pieces = zip(x.split(ctx.routes.sizes), grad.split(ctx.routes.sizes))
            for expert, (a, g) in enumerate(pieces):
                kernel = weight[expert].to(g.dtype)
                grad_x.append(g @ (kernel.T if ctx.transposed else kernel))
                _finish(ctx, 0, expert, Outer(g, a) if ctx.transposed else Outer(a, g), out[0])
                _finish(ctx, 1, expert, Dense(g), out[1])
        for module_handles, whole in zip(ctx.module_handles, out):
            if module_handles and whole is not None:
                next(iter(module_handles[0].handles.values())).send(whole)
        return torch.cat(grad_x), *out, None, None, None


def _finish(ctx: Any, place: int, expert: int, rows: AnyGradients, target: Tensor | None) -> None:
    """Writes the gradient of one expert's slice into the whole."""
    module_handles, calls = ctx.module_handles[place], ctx.calls[place]
    if target is None or module_handles is None:
        return
    module_handle: ModuleHandle = module_handles[expert]
    (own,) = module_handle.handles
    module_handle.handles[own].done = True  # also when no position was routed here
    made = module_handle.finish(calls[expert], {own: rows})
    for gradient in made.values():
        target[expert] = gradient.to(target.dtype)
    if not made and not module_handle.others(calls[expert]):  # no call has reached this expert
        module_handle.session.rule.collect_zeros(module_handle.handles[own])
