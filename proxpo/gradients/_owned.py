"""Modules that use parameters of their own in ways only their code knows."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from proxpo.gradients import _place
from proxpo.gradients._functions import Linear, embedding
from proxpo.gradients._session import Session, Site
from proxpo.shapes import Tensor

Forward = Callable[..., Any]


@contextmanager
def substituted(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Let `module.weight` and the like be other tensors for a while; dotted names reach below."""
    owners = []
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        owners.append((owner, attribute, owner._parameters.pop(attribute)))
        owner.__dict__[attribute] = value
    try:
        yield
    finally:
        for owner, attribute, own in owners:
            del owner.__dict__[attribute]
            owner._parameters[attribute] = own


class _Unfamiliar(Exception):
    """A parameter was used by an operation that has no per-sequence form here."""


class _Weight(torch.Tensor):
    """Stands for a matrix inside its module's forward: F.linear and F.embedding are understood."""

    layer: Linear
    owner: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # .shape, .dtype, .device
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if len(args) > 1 and isinstance(args[1], _Weight) and not isinstance(args[0], _Weight):
            stand_in, options = args[1], {*args[2:], *kwargs.values()}
            if func is F.linear and options <= {None}:
                return stand_in.layer(args[0], stand_in.owner)
            if func is F.embedding:
                return _lookup(stand_in, *args[:1], *args[2:], **kwargs)
        raise _Unfamiliar(getattr(func, "__name__", str(func)))


def _lookup(
    stand_in: _Weight,
    input: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding with its own signature; the options that change the gradient are not ours."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise _Unfamiliar("embedding")
    return embedding(stand_in.layer, input, stand_in.owner, padding_idx)


def tracked(
    session: Session,
    module: nn.Module,
    name: str,
    names: list[str],
    original: Forward,
    warn: Callable[[str], None],
) -> Forward:
    """Try the module's own matrices in F.linear and F.embedding; for anything else run it twice."""
    if not all(_reach(module, own).dim() == 2 for own in names):
        return whole(session, module, name, names, original, warn)
    layers = {
        own: Linear(session, session.add(module, name, [own], draws=True), weight=own)
        for own in names
    }
    sites = {own: layer.unit.sites[own] for own, layer in layers.items()}
    fallback = _twice(session, sites, module, name, original, warn)
    familiar = True

    def stand_in(own: str) -> Tensor:
        value = _reach(module, own)
        weight = value.detach().as_subclass(_Weight)
        weight.owner, weight.layer = value, layers[own]
        return weight

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal familiar
        if familiar:
            try:
                with substituted(module, {own: stand_in(own) for own in names}):
                    return original(*args, **kwargs)
            except _Unfamiliar:
                familiar = False
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
    return _twice(session, sites, module, name, original, warn)


def _twice(
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
    what = f"{name or 'the model itself'} ({type(module).__name__}: {', '.join(sites)})"

    def forward(*args: Any, **kwargs: Any) -> Any:
        warn(what)
        again = _Again(session, sites, module, original, args, kwargs)
        values = [_reach(module, own) for own in sites]
        with substituted(module, {own: v.detach() for own, v in zip(sites, values)}):
            out = original(*args, **kwargs)
        leaves, spec = tree_flatten(out)
        floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        passed = [leaf for leaf, keep in zip(leaves, floating) if keep]
        passed = iter(_Beside.apply(again, len(passed), *passed, *values))
        leaves = [next(passed) if keep else leaf for leaf, keep in zip(leaves, floating)]
        return tree_unflatten(leaves, spec)

    return forward


def _reach(module: nn.Module, name: str) -> Tensor:
    value: Any = module
    return functools.reduce(getattr, name.split("."), value)


class _Again:
    """All that is needed to run a module a second time."""

    def __init__(
        self,
        session: Session,
        sites: dict[str, Site],
        module: nn.Module,
        original: Forward,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.session, self.sites, self.module = session, sites, module
        self.original, self.block = original, session.block
        self.site = next(iter(sites.values()))
        self.inputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {session.layout.seq.device.type, "cpu"}
        }
        self.random = torch.get_rng_state()
        cuda = session.layout.seq.is_cuda
        self.devices = [session.layout.seq.device] if cuda else []
        self.random_cuda = torch.cuda.get_rng_state(self.devices[0]) if cuda else None

    def outputs(self, values: list[Tensor]) -> list[Tensor]:
        """The floating outputs, as functions of the parameters alone."""
        kind = self.session.layout.seq.device.type
        enabled, dtype = self.autocast[kind]
        with torch.random.fork_rng(self.devices), torch.enable_grad():
            torch.set_rng_state(self.random)
            if self.random_cuda is not None:
                torch.cuda.set_rng_state(self.random_cuda, self.devices[0])
            self.session.quiet = True
            try:
                with (
                    torch.autocast(kind, dtype=dtype, enabled=enabled),
                    substituted(self.module, dict(zip(self.sites, values))),
                ):
                    out = self.original(*self.inputs[0], **self.inputs[1])
            finally:
                self.session.quiet = False
        leaves, _ = tree_flatten(out)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def weighted(self, grad: Tensor) -> Tensor:
        """A[seq] g: each position's gradient times the advantage of its sequence."""
        session, lead = self.session, tuple(grad.shape[:-1])
        chosen = _place.axes(lead, session.shape, self.site.name)
        weights = session.layout.spread(session.rule.plain(session)).to(grad.dtype)
        shape = [lead[axis] if axis in chosen else 1 for axis in range(len(lead))]
        return grad * weights.view(*shape, 1)


class _Beside(torch.autograd.Function):
    """The outputs unchanged; on the way back, the gradient of the module's own parameters."""

    @staticmethod
    def forward(ctx: Any, again: _Again, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again, ctx.count = again, count
        ctx.save_for_backward(*tensors[count:])
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        again: _Again = ctx.again
        again.session.expect(again.block, again.site)
        values = [v.detach().requires_grad_() for v in ctx.saved_tensors]
        pairs = [
            (out, _place.with_channels_last(again.module, grad, again.weighted))
            for out, grad in zip(again.outputs(values), grads)
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
