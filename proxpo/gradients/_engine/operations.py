"""Helpers of the autograd functions of a session.

They cast as autocast does, register calls, flatten positions and hand gradients back.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.position_axes import flatten_positions, position_axes
from proxpo.gradients._engine.session import Call, ModuleHandle, Session
from proxpo.ops.shapes import Tensor

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


def returned(
    module_handle: ModuleHandle, attribute: str, gradient: Tensor | None, kind: torch.dtype
) -> Any:
    """The gradient to return to autograd, in the parameter's dtype; None while calls are open."""
    if gradient is None:
        return None
    gradient = gradient if gradient.dtype == kind else gradient.to(kind)
    return module_handle.handles[attribute].send(gradient)


def linear(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, with an output that may be changed in place and shows it.

    It is no view, which autograd lets nobody change, but counts versions with the result of the
    product: selective checkpointing, which keeps that result, refuses it once it has been changed.
    There alone a dispatch mode is active, and the product is taken of a matrix, since `F.linear`
    of more axes would return a copy of the count.
    """
    if torch._C._len_torch_dispatch_stack() and x.dim() > 2:
        out = F.linear(x.flatten(0, -2), kernel, bias).unflatten(0, x.shape[:-1])
    else:
        out = F.linear(x, kernel, bias)
    return out if out._base is None else out.detach()


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, at no cost where no second derivative is asked for."""
    refusing = once_differentiable(backward)

    def run(ctx: Any, *grads: Tensor) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def flat_positions(x: Tensor, module_handle: ModuleHandle) -> Tensor:
    """(..., D) -> (positions x extra, D), positions first."""
    shape = module_handle.session.shape
    if x.shape[:-1] == shape:
        return x.reshape(-1, x.shape[-1])
    return flatten_positions(x, shape, module_handle.name)[0]


def begin_call(module_handle: ModuleHandle, lead: tuple[int, ...]) -> Call:
    """Registers a call of a module whose input has these leading axes."""
    layout, shape = module_handle.session.layout, module_handle.session.shape
    if lead != shape:
        position_axes(lead, shape, module_handle.name)
        layout = layout.repeat(math.prod(lead) // layout.size)
    return module_handle.begin(layout)


def shows_positions(session: Session, *args: Any, **kwargs: Any) -> bool:
    """True where the leading axes of a module's first input show the positions."""
    x = next(iter((*args, *kwargs.values())))
    try:
        position_axes(tuple(x.shape[:-1]), session.shape, "")
    except ProxpoError:
        return False
    return True
