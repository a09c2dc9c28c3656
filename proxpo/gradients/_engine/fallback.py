"""Parameters without a per-sequence form: their modules are run again in the backward pass.

Before that, `proxies.py` follows matrices and vectors that a module uses itself to a form it knows.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.audit import some_entries
from proxpo.gradients._engine.module import Forward, TrainedModule, is_container
from proxpo.gradients._engine.outputs import floating, guard_others, with_floating
from proxpo.gradients._engine.position_axes import with_channels_last
from proxpo.gradients._engine.proxies import (
    ParameterProxy,
    TrackedParameter,
    UnsupportedUse,
    proxy_of,
)
from proxpo.gradients._engine.replay import (
    Inputs,
    ReplayState,
    Rerun,
    buffers_of,
    substituted,
    with_buffers,
)
from proxpo.gradients._engine.session import ParameterHandle
from proxpo.ops.shapes import Tensor


def tracked(target: TrainedModule) -> Forward:
    """Follows the module's own matrices and vectors to their use; runs it again for other uses.

    Vectors only where the module has no children: within an attention, say, the position at which
    a vector takes part need not be that of the output.
    """
    session, module, original = target.session, target.module, target.forward
    leaf = all(part is module or is_container(part) for part in module.modules())
    if not all(target.value(own).dim() in ((1, 2) if leaf else (2,)) for own in target.names):
        return rerun_all(target)
    handles = target.separate_handles()
    other = rerun(target, {own: handle.handles[own] for own, handle in handles.items()})
    # The block that met an unsupported use. Tried again until it ends: a checkpoint runs it twice.
    refused: int | None = None

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        if refused in (None, session.block):
            supported = False
            before = ReplayState(session, (args, kwargs))
            parameters = [
                TrackedParameter(session, handle, own, target.value(own))
                for own, handle in handles.items()
            ]
            try:
                with substituted(module, {x.attribute: proxy_of(x) for x in parameters}):
                    out = original(*args, **kwargs)
                supported = not any(isinstance(leaf, ParameterProxy) for leaf in tree_leaves(out))
            except UnsupportedUse:
                pass
            finally:
                for parameter in parameters:
                    parameter.inside = False
            if supported:
                return out
            refused = session.block
            before.restore()
        return other(*args, **kwargs)

    return forward


def rerun_all(target: TrainedModule) -> Forward:
    """Σ_i A_i V_i for all parameters of the module, used in any way."""
    return rerun(target, target.handle(draws=False).handles)


def rerun(target: TrainedModule, handles: dict[str, ParameterHandle]) -> Forward:
    """Σ_i A_i V_i by running the module again in the backward pass.

    The first run sees constants in place of its own parameters, so its inputs and its children
    get their gradients as usual; the second sees everything else as constants and pulls back
    A[seq] g, which is right wherever sequences do not mix. Gradients of results that leave the
    module otherwise than as its return value are refused. One case is not seen: a closure or a
    global keeps a result that the loss reads beside the return value.
    """
    session, module, original = target.session, target.module, target.forward
    used: dict[str, ParameterHandle] | None = None
    label = ""

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal used, label
        if used is None:
            used = handles | _uncalled(target, (args, kwargs))
            label = _label(target, used)
        if not used:
            return original(*args, **kwargs)
        target.warn(label)
        second = Rerun(target, used, label, (args, kwargs))
        values = [target.value(own) for own in used]
        constants = {own: _constant(value, second) for own, value in zip(used, values)}
        outer = session.covered
        session.covered = outer | {id(h.module) for h in used.values() if h.module is not module}
        try:
            with substituted(module, constants):
                out = original(*args, **kwargs)
        finally:
            session.covered = outer
        returned = floating(out)
        second.first = [some_entries(x) for x in returned]
        passed = iter(_AddGradients.apply(second, len(returned), *returned, *values))
        out = with_floating(out, lambda _: next(passed))
        guard_others(module, (args, kwargs), constants.values(), second.refusal)
        return out

    return forward


def _label(target: TrainedModule, names: Iterable[str]) -> str:
    kind = type(target.module).__name__
    return f"{target.name or 'the model itself'} ({kind}: {', '.join(names)})"


def _uncalled(target: TrainedModule, inputs: Inputs) -> dict[str, ParameterHandle]:
    """Parameters of children that the module uses without calling the child.

    State space models hand `self.conv1d.weight` to a kernel, for example. Also children
    which get positions and heads in one axis: only the module above can tell them apart.
    """
    session, module = target.session, target.module
    below = {
        id(child): path
        for path, child in module.named_modules(remove_duplicate=False)
        if child is not module
    }
    mine = [handle for handle in session.handles.values() if id(handle.module) in below]
    if not mine:
        return {}
    before, outer = ReplayState(session, inputs), session.called
    session.called = called = set[int]()
    try:
        with torch.no_grad(), with_buffers(buffers_of(module)):
            target.forward(*inputs[0], **inputs[1])
    finally:
        session.called = None if outer is None else outer | called
        before.restore()
    candidates = {
        f"{below[id(handle.module)]}.{handle.attribute}": handle
        for handle in mine
        if id(handle.module) not in called
    }
    return {own: candidates[own] for own in _affecting_output(target, inputs, candidates)}


def _affecting_output(target: TrainedModule, inputs: Inputs, names: Iterable[str]) -> list[str]:
    """Parameters below a module on which its outputs depend."""
    values: dict[str, Tensor] = {own: nn.Parameter(target.value(own).detach()) for own in names}
    if not values:
        return []
    second = Rerun(target, {}, _label(target, values), inputs)
    # Not in the memory of a checkpoint around the module, whose second run does not come by here.
    with saved_tensors_hooks(lambda x: x, lambda x: x), second.outputs(values) as returned:
        outs = [out.sum() for out in returned if out.requires_grad]
        grads = second.pull_back(outs, [*values.values()], [out.detach() for out in outs])
    return [own for own, gradient in zip(values, grads) if gradient is not None]


class _Constant(torch.autograd.Function):
    """The identity; gradients end here, and only those that come by the return value may."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, second: Rerun) -> Tensor:
        ctx.second = second
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None and ctx.second.reached != torch._C._current_graph_task_id():
            raise ProxpoError(ctx.second.refusal)
        return None, None


def _constant(value: Tensor, second: Rerun) -> Tensor:
    """A parameter without gradient that looks trained, since a forward may ask."""
    made = _Constant.apply(value, second)
    made._is_param = True
    return made


class _AddGradients(torch.autograd.Function):
    """The identity on the outputs, whose backward adds the gradients of the module's parameters."""

    @staticmethod
    def forward(ctx: Any, second: Rerun, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.second, ctx.count = second, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        # Copies: autograd lets nobody change views in place, and models do.
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        second: Rerun = ctx.second
        second.session.enter_backward(second.block, second.handle)
        second.reached = torch._C._current_graph_task_id()
        values: list[Tensor] = [nn.Parameter(v.detach()) for v in ctx.saved_tensors]
        with second.outputs(dict(zip(second.handles, values))) as outs:
            second.compare(outs)
            pairs = [
                (out, with_channels_last(second.module, grad, second.weighted))
                for out, grad in zip(outs, grads)
                if grad is not None and out.requires_grad
            ]
            reached, cotangents = zip(*pairs) if pairs else ((), ())
            gradients = second.pull_back(reached, values, cotangents)
        for handle, gradient in zip(second.handles.values(), gradients):
            handle.done = True
            if gradient is not None:
                handle.send(gradient)
        return None, None, *grads, *gradients
