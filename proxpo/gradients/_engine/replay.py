"""Runs a module a second time in the backward pass, from the state that its first run found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.audit import TOLERANCE, some_entries
from proxpo.gradients._engine.module import TrainedModule
from proxpo.gradients._engine.outputs import containers, floating
from proxpo.gradients._engine.position_axes import position_axes
from proxpo.gradients._engine.session import ParameterHandle, Session
from proxpo.ops.shapes import Bool, Float, Tensor

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


class ReplayState:
    """Random state and contents of mutable inputs (a key-value cache), to run a module again."""

    def __init__(self, session: Session, inputs: Any) -> None:
        self.random = torch.get_rng_state()
        device = session.layout.seq.device
        self.device = device if device.type == "cuda" else None
        self.random_cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)
        self.contents = [(part, part.copy()) for part in containers(inputs)]

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.random_cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.random_cuda, self.device)
        for container, content in self.contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


class Rerun:
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
        self.first: list[Tensor] = []  # some entries of each output of the first run
        self.reached = -1  # number of the last backward pass that came by the return value
        self.before = ReplayState(self.session, inputs)
        self.inputs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, inputs)
        # The first run may change them: running statistics, the vectors of spectral_norm.
        self.buffers = buffers_of(self.module)
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {self.session.layout.seq.device.type, "cpu"}
        }

    @contextmanager
    def outputs(self, values: dict[str, Tensor]) -> Iterator[list[Tensor]]:
        """The floating outputs, as functions of the parameters alone.

        To be differentiated inside: checkpointed segments of the module run once more then.
        """
        session, kind = self.session, self.session.layout.seq.device.type
        enabled, dtype = self.autocast[kind]
        now, outer = ReplayState(session, self.raw), session.suspended
        self.before.restore()
        session.suspended = True
        try:
            with with_buffers(self.buffers), substituted(self.module, values):
                with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                    out = self.target.forward(*self.inputs[0], **self.inputs[1])
                yield floating(out)
        finally:
            session.suspended = outer
            now.restore()

    def compare(self, outs: Sequence[Tensor]) -> None:
        """Queues a check that the second run gave what the first one had given.

        It differs where a mode, an attribute or an input in place has changed since, or where the
        forward itself changes what it reads: the gradient would be that of another function.
        """
        differ = torch.ones((), dtype=torch.bool, device=self.session.layout.seq.device)
        second = [some_entries(x) for x in outs]
        if [x.shape for x in second] == [x.shape for x in self.first]:
            bad = [_differ(*pair, x.dtype) for pair, x in zip(zip(second, self.first), outs)]
            differ = torch.stack([x.to(differ.device) for x in bad]).any() if bad else ~differ
        self.session.expect_same(self.label, differ)

    def pull_back(
        self, outs: Sequence[Tensor], values: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the values, None for those without influence."""
        if not outs:
            return (None,) * len(values)
        try:
            return torch.autograd.grad(outs, values, cotangents, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ProxpoError(
                f"gradients.applied: {self.label} has no per-sequence form and checkpoints a "
                "segment in the reentrant way, which cannot run twice; take use_reentrant=False"
            ) from error

    @property
    def refusal(self) -> str:
        """Reason to refuse a gradient that does not come by the return value."""
        return (
            f"gradients.applied: {self.label} has no per-sequence form, and what it computes is "
            "used otherwise than from its return value (an attribute, a list that it was given, an "
            "object that is no dataclass): return those tensors, or freeze the parameters with "
            "requires_grad_(False)"
        )

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


def _differ(second: Tensor, first: Tensor, kind: torch.dtype) -> Bool[Tensor, ""]:
    """True where two runs differ by more than a GPU's order of sums does; infinities are equal."""
    change = torch.where(second == first, 0.0, second - first)
    size = torch.where(first.isfinite(), first, 0.0).norm()
    return change.norm() > TOLERANCE.get(kind, 5e-2) * size


def buffers_of(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {
        (owner, name): value.clone()
        for owner in module.modules()
        for name, value in owner._buffers.items()
        if value is not None
    }


@contextmanager
def with_buffers(values: dict[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    """Gives buffers other values for a while."""
    own = {(owner, name): owner._buffers[name] for owner, name in values}
    try:
        for (owner, name), value in values.items():
            owner._buffers[name] = value.clone()
        yield
    finally:
        for (owner, name), before in own.items():
            owner._buffers[name] = before
