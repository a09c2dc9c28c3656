"""Parameters without a per-sequence form: their modules are run again in the backward pass.

Before that, `proxies.py` follows matrices and vectors that a module uses itself to a form it knows.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.module import Forward, TrainedModule
from proxpo.gradients._engine.position_axes import position_axes, with_channels_last
from proxpo.gradients._engine.proxies import (
    ParameterProxy,
    TrackedParameter,
    UnsupportedUse,
    proxy_of,
)
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.ops.shapes import Float, Tensor

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def substituted(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Replaces parameters of a module by other tensors for a while; dotted names reach children."""
    owners = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        owners.append((owner, attribute, owner._parameters[attribute]))
        _put(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, own in owners:
            _put(owner, attribute, own)


def _put(owner: Any, attribute: str, value: Tensor) -> None:
    owner._parameters[attribute] = value
    if isinstance(owner, nn.RNNBase):  # its forward reads the weights from a list
        owner._flat_weights[owner._flat_weights_names.index(attribute)] = value


def tracked(target: TrainedModule) -> Forward:
    """Follows the module's own matrices and vectors to their use; runs it again for other uses.

    Vectors only where the module has no children: within an attention, say, the position at which
    a vector takes part need not be that of the output.
    """
    session, module, original = target.session, target.module, target.forward
    leaf = not any(module.children())
    if not all(target.value(own).dim() in ((1, 2) if leaf else (2,)) for own in target.names):
        return rerun_all(target)
    handles = target.separate_handles()
    other = rerun(target, {own: handle.handles[own] for own, handle in handles.items()})
    supported = True

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal supported
        if supported:
            before = _ReplayState(session, (args, kwargs))
            parameters = [
                TrackedParameter(session, handle, own, target.value(own))
                for own, handle in handles.items()
            ]
            try:
                with substituted(module, {x.attribute: proxy_of(x) for x in parameters}):
                    out = original(*args, **kwargs)
                supported = not any(isinstance(leaf, ParameterProxy) for leaf in tree_leaves(out))
            except UnsupportedUse:
                supported = False
            finally:
                for parameter in parameters:
                    parameter.inside = False
            if supported:
                return out
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
    A[seq] g, which is right wherever sequences do not mix.
    """
    session, module, original = target.session, target.module, target.forward
    used: dict[str, ParameterHandle] | None = None
    label = ""

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal used, label
        if used is None:
            used = handles | _uncalled(target, (args, kwargs))
            kind = type(module).__name__
            label = f"{target.name or 'the model itself'} ({kind}: {', '.join(used)})"
        if not used:
            return original(*args, **kwargs)
        target.warn(label)
        second = _Rerun(target, used, label, (args, kwargs))
        values = [target.value(own) for own in used]
        outer = session.covered
        session.covered = outer | {id(h.module) for h in used.values() if h.module is not module}
        try:
            with substituted(module, {own: _constant(v) for own, v in zip(used, values)}):
                out = original(*args, **kwargs)
        finally:
            session.covered = outer
        leaves, spec = tree_flatten(out)
        floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        passed = [leaf for leaf, keep in zip(leaves, floating) if keep]
        passed = iter(_AddGradients.apply(second, len(passed), *passed, *values))
        leaves = [next(passed) if keep else leaf for leaf, keep in zip(leaves, floating)]
        return tree_unflatten(leaves, spec)

    return forward


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
    before, outer = _ReplayState(session, inputs), session.called
    session.called = called = set[int]()
    try:
        with torch.no_grad(), _with_buffers(_buffers(module)):
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
    second = _Rerun(target, {}, "", inputs)
    outs = [out.sum() for out in second.outputs(values) if out.requires_grad]
    if not outs:
        return []
    grads = torch.autograd.grad(
        outs, [*values.values()], [o.detach() for o in outs], allow_unused=True
    )
    return [own for own, gradient in zip(values, grads) if gradient is not None]


class _Constant(torch.autograd.Function):
    """The identity; gradients end here."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _constant(value: Tensor) -> Tensor:
    """A parameter without gradient that looks trained, since a forward may ask."""
    made = _Constant.apply(value)
    made._is_param = True
    return made


class _ReplayState:
    """Random state and contents of mutable inputs (a key-value cache), to run a module again."""

    def __init__(self, session: Session, inputs: Any) -> None:
        self.random = torch.get_rng_state()
        device = session.layout.seq.device
        self.device = device if device.type == "cuda" else None
        self.random_cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)
        self.contents: list[tuple[Any, Any]] = []
        self._collect(inputs, set())

    def _collect(self, value: Any, visited: set[int]) -> None:
        if isinstance(value, _UNCHANGED) or callable(value) or id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, list | dict):
            self.contents.append((value, value.copy()))
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, list | tuple):
            parts = value
        else:
            parts = [getattr(value, "__dict__", None)]
        for part in parts:
            self._collect(part, visited)

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.random_cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.random_cuda, self.device)
        for container, content in self.contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


_UNCHANGED = (Tensor, nn.Module, str, bytes, int, float, complex, type(None), torch.dtype)


class _Rerun:
    """Everything needed to run a module a second time."""

    def __init__(
        self,
        target: TrainedModule,
        handles: dict[str, ParameterHandle],
        label: str,
        inputs: Inputs,
    ) -> None:
        self.target, self.handles, self.label = target, handles, label
        self.session, self.module, self.block = target.session, target.module, target.session.block
        self.raw = inputs
        self.before = _ReplayState(self.session, inputs)
        self.inputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, inputs)
        # The first run may change them: running statistics, the vectors of spectral_norm.
        self.buffers = _buffers(self.module)
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {self.session.layout.seq.device.type, "cpu"}
        }

    def outputs(self, values: dict[str, Tensor]) -> list[Tensor]:
        """The floating outputs, as functions of the parameters alone."""
        kind = self.session.layout.seq.device.type
        enabled, dtype = self.autocast[kind]
        now = _ReplayState(self.session, self.raw)
        self.before.restore()
        self.session.suspended = True
        try:
            with (
                torch.enable_grad(),
                torch.autocast(kind, dtype=dtype, enabled=enabled),
                _with_buffers(self.buffers),
                substituted(self.module, values),
            ):
                out = self.target.forward(*self.inputs[0], **self.inputs[1])
        finally:
            self.session.suspended = False
            now.restore()
        leaves, _ = tree_flatten(out)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def handle(self) -> ParameterHandle:
        return next(iter(self.handles.values()))

    def weighted(self, grad: Tensor) -> Tensor:
        """A[seq] g: each position's gradient times the advantage of its sequence."""
        session, lead = self.session, tuple(grad.shape[:-1])
        weights = session.rule.base_weights(session).to(grad.dtype)
        try:
            chosen = position_axes(lead, session.shape, self.handle.name)
        except ProxpoError as why:
            return grad * self._by_row(grad, weights, why)
        shape = [lead[axis] if axis in chosen else 1 for axis in range(len(lead))]
        return grad * session.layout.spread(weights).view(*shape, 1)

    def _by_row(self, grad: Tensor, weights: Float[Tensor, " row"], why: Exception) -> Tensor:
        """Weights along the first axis, where that can only be the rows of `sequences`."""
        layout, shape = self.session.layout, self.session.shape
        rows = len(shape) == 2 and shape[0] == layout.count and layout.alone and layout.aligned
        if not rows or list(grad.shape).count(layout.count) != 1 or len(grad) != layout.count:
            raise ProxpoError(
                f"gradients.applied: {self.label} has no per-sequence form, and the axes of its "
                f"output, of shape {tuple(grad.shape)}, do not show the sequences of `sequences`, "
                f"of shape {tuple(shape)}; freeze it with requires_grad_(False)"
            ) from why
        return weights.view(-1, *[1] * (grad.dim() - 1))


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {
        (owner, name): value.clone()
        for owner in module.modules()
        for name, value in owner._buffers.items()
        if value is not None
    }


@contextmanager
def _with_buffers(values: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Gives buffers other values for a while."""
    own = {(owner, name): owner._buffers[name] for owner, name in values}
    try:
        for (owner, name), value in values.items():
            owner._buffers[name] = value.clone()
        yield
    finally:
        for (owner, name), before in own.items():
            owner._buffers[name] = before


class _AddGradients(torch.autograd.Function):
    """The identity on the outputs, whose backward adds the gradients of the module's parameters."""

    @staticmethod
    def forward(ctx: Any, second: _Rerun, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.second, ctx.count = second, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        # Copies: autograd lets nobody change views in place, and models do.
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        second: _Rerun = ctx.second
        second.session.check_block(second.block, second.handle)
        values: list[Tensor] = [nn.Parameter(v.detach()) for v in ctx.saved_tensors]
        pairs = [
            (out, with_channels_last(second.module, grad, second.weighted))
            for out, grad in zip(second.outputs(dict(zip(second.handles, values))), grads)
            if grad is not None and out.requires_grad
        ]
        gradients: tuple[Tensor | None, ...] = (None,) * len(values)
        if pairs:
            outs, cotangents = zip(*pairs)
            gradients = torch.autograd.grad(outs, values, cotangents, allow_unused=True)
        for handle, gradient in zip(second.handles.values(), gradients):
            handle.done = True
            if gradient is not None:
                handle.send(gradient)
        return None, None, *grads, *gradients
