"""Modules that use parameters of their own in ways only their code knows."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from proxpo.errors import ProxpoError
from proxpo.gradients import _place
from proxpo.gradients._session import Session, Site
from proxpo.gradients._stand_in import Own, StandIn, Unfamiliar, stand_in
from proxpo.ops.shapes import Float, Tensor

Forward = Callable[..., Any]


@contextmanager
def substituted(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Let `module.weight` and the like be other tensors for a while; dotted names reach below."""
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


def tracked(
    session: Session,
    module: nn.Module,
    name: str,
    names: list[str],
    original: Forward,
    warn: Callable[[str], None],
) -> Forward:
    """Follow the module's own matrices and vectors to their use; for others run it twice.

    Vectors only where nothing is below the module: within an attention, say, the position at which
    a vector takes part need not be that of the output.
    """
    leaf = not any(module.children())
    if not all(_reach(module, own).dim() in ((1, 2) if leaf else (2,)) for own in names):
        return whole(session, module, name, names, original, warn)
    units = {own: session.add(module, name, [own], draws=True) for own in names}
    sites = {own: unit.sites[own] for own, unit in units.items()}
    fallback = twice(session, sites, module, name, original, warn)
    familiar = True

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal familiar
        if familiar:
            before = _State(session, (args, kwargs))
            owns = [Own(session, units[own], own, _reach(module, own)) for own in names]
            try:
                with substituted(module, {own.attribute: stand_in(own) for own in owns}):
                    out = original(*args, **kwargs)
                familiar = not any(isinstance(leaf, StandIn) for leaf in tree_leaves(out))
            except Unfamiliar:
                familiar = False
            finally:
                for own in owns:
                    own.inside = False
            if familiar:
                return out
            before.restore()
        return fallback(*args, **kwargs)

    return forward


def whole(
    session: Session,
    module: nn.Module,
    name: str,
    names: list[str],
    original: Forward,
    warn: Callable[[str], None],
) -> Forward:
    """Σ_i A_i V_i for parameters of any use."""
    sites = session.add(module, name, names, draws=False).sites
    return twice(session, sites, module, name, original, warn)


def twice(
    session: Session,
    sites: dict[str, Site],
    module: nn.Module,
    name: str,
    original: Forward,
    warn: Callable[[str], None],
) -> Forward:
    """Σ_i A_i V_i by running the module again in the backward pass.

    The first run sees constants in place of its own parameters, so its inputs and its children
    get their gradients as usual; the second sees everything else as constants and pulls back
    A[seq] g, which is right wherever sequences do not mix.
    """
    used: dict[str, Site] | None = None
    what = ""

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal used, what
        if used is None:
            used = sites | _idle(session, module, original, args, kwargs)
            what = f"{name or 'the model itself'} ({type(module).__name__}: {', '.join(used)})"
        if not used:
            return original(*args, **kwargs)
        warn(what)
        again = _Again(session, used, module, what, original, args, kwargs)
        values = [_reach(module, own) for own in used]
        outer = session.covered
        session.covered = outer | {id(s.module) for s in used.values() if s.module is not module}
        try:
            with substituted(module, {own: _constant(v) for own, v in zip(used, values)}):
                out = original(*args, **kwargs)
        finally:
            session.covered = outer
        leaves, spec = tree_flatten(out)
        floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        passed = [leaf for leaf, keep in zip(leaves, floating) if keep]
        passed = iter(_Beside.apply(again, len(passed), *passed, *values))
        leaves = [next(passed) if keep else leaf for leaf, keep in zip(leaves, floating)]
        return tree_unflatten(leaves, spec)

    return forward


def _idle(
    session: Session, module: nn.Module, original: Forward, args: Any, kwargs: Any
) -> dict[str, Site]:
    """Parameters of children that the module does not call: if it uses them, then directly.

    State space models hand `self.conv1d.weight` to a kernel, for example. Also children
    which get positions and heads in one axis: only the module above can tell them apart.
    """
    below = {
        id(child): path
        for path, child in module.named_modules(remove_duplicate=False)
        if child is not module
    }
    mine = [site for site in session.sites.values() if id(site.module) in below]
    if not mine:
        return {}
    before, outer = _State(session, (args, kwargs)), session.called
    session.called = called = set[int]()
    try:
        with torch.no_grad(), _with_buffers(_buffers(module)):
            original(*args, **kwargs)
    finally:
        session.called = None if outer is None else outer | called
        before.restore()
    silent = {
        f"{below[id(site.module)]}.{site.attribute}": site
        for site in mine
        if id(site.module) not in called
    }
    return {own: silent[own] for own in _in_use(session, module, original, args, kwargs, silent)}


def _in_use(
    session: Session,
    module: nn.Module,
    original: Forward,
    args: Any,
    kwargs: Any,
    names: Iterable[str],
) -> list[str]:
    """Parameters below a module on which its outputs depend."""
    values: dict[str, Tensor] = {own: nn.Parameter(_reach(module, own).detach()) for own in names}
    if not values:
        return []
    again = _Again(session, {}, module, "", original, args, kwargs)
    outs = [out.sum() for out in again.outputs(values) if out.requires_grad]
    if not outs:
        return []
    found = torch.autograd.grad(
        outs, [*values.values()], [o.detach() for o in outs], allow_unused=True
    )
    return [own for own, gradient in zip(values, found) if gradient is not None]


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
    """A parameter without gradient that looks like one with: a forward may ask."""
    made = _Constant.apply(value)
    made._is_param = True
    return made


def _reach(module: nn.Module, name: str) -> Tensor:
    value: Any = module
    return functools.reduce(getattr, name.split("."), value)


class _State:
    """Random state and contents of mutable inputs (a key-value cache), to run a module again."""

    def __init__(self, session: Session, inputs: Any) -> None:
        self.random = torch.get_rng_state()
        device = session.layout.seq.device
        self.device = device if device.type == "cuda" else None
        self.random_cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)
        self.contents: list[tuple[Any, Any]] = []
        self._collect(inputs, set())

    def _collect(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, _UNCHANGED) or callable(value) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, list | dict):
            self.contents.append((value, value.copy()))
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, list | tuple):
            parts = value
        else:
            parts = [getattr(value, "__dict__", None)]
        for part in parts:
            self._collect(part, seen)

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.random_cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.random_cuda, self.device)
        for container, content in self.contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


_UNCHANGED = (Tensor, nn.Module, str, bytes, int, float, complex, type(None), torch.dtype)


class _Again:
    """Everything needed to run a module a second time."""

    def __init__(
        self,
        session: Session,
        sites: dict[str, Site],
        module: nn.Module,
        what: str,
        original: Forward,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.session, self.sites, self.module, self.what = session, sites, module, what
        self.original, self.block = original, session.block
        self.raw = (args, kwargs)
        self.before = _State(session, self.raw)
        self.inputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, self.raw)
        # The first run may change them: running statistics, the vectors of spectral_norm.
        self.buffers = _buffers(module)
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {session.layout.seq.device.type, "cpu"}
        }

    def outputs(self, values: dict[str, Tensor]) -> list[Tensor]:
        """The floating outputs, as functions of the parameters alone."""
        kind = self.session.layout.seq.device.type
        enabled, dtype = self.autocast[kind]
        now = _State(self.session, self.raw)
        self.before.restore()
        self.session.quiet = True
        try:
            with (
                torch.enable_grad(),
                torch.autocast(kind, dtype=dtype, enabled=enabled),
                _with_buffers(self.buffers),
                substituted(self.module, values),
            ):
                out = self.original(*self.inputs[0], **self.inputs[1])
        finally:
            self.session.quiet = False
            now.restore()
        leaves, _ = tree_flatten(out)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    @property
    def site(self) -> Site:
        return next(iter(self.sites.values()))

    def weighted(self, grad: Tensor) -> Tensor:
        """A[seq] g: each position's gradient times the advantage of its sequence."""
        session, lead = self.session, tuple(grad.shape[:-1])
        weights = session.rule.plain(session).to(grad.dtype)
        try:
            chosen = _place.axes(lead, session.shape, self.site.name)
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
                f"gradients.applied: {self.what} has no per-sequence form, and the axes of its "
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
    """Let buffers have other values for a while."""
    own = {(owner, name): owner._buffers[name] for owner, name in values}
    try:
        for (owner, name), value in values.items():
            owner._buffers[name] = value.clone()
        yield
    finally:
        for (owner, name), before in own.items():
            owner._buffers[name] = before


class _Beside(torch.autograd.Function):
    """The outputs unchanged; on the way back, the gradient of the module's own parameters."""

    @staticmethod
    def forward(ctx: Any, again: _Again, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again, ctx.count = again, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[count:])
        # Copies: autograd lets nobody change views in place, and models do.
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        again: _Again = ctx.again
        again.session.expect(again.block, again.site)
        values: list[Tensor] = [nn.Parameter(v.detach()) for v in ctx.saved_tensors]
        pairs = [
            (out, _place.with_channels_last(again.module, grad, again.weighted))
            for out, grad in zip(again.outputs(dict(zip(again.sites, values))), grads)
            if grad is not None and out.requires_grad
        ]
        found: tuple[Tensor | None, ...] = (None,) * len(values)
        if pairs:
            outs, cotangents = zip(*pairs)
            found = torch.autograd.grad(outs, values, cotangents, allow_unused=True)
        for site, gradient in zip(again.sites.values(), found):
            site.done = True
            if gradient is not None:
                site.send(gradient)
        return None, None, *grads, *found
