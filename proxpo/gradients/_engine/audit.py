"""Checks that every gradient passes through the transform, in every block.

A weight that is also used without calling its module (`h @ embed.weight.T`) would get a gradient
without advantages for that use. Each handle reports the very tensor that it returns to autograd; a
hook on the parameter, which runs before any other, sees the tensor that arrives. With one use they
are the same object, which costs nothing to see. Where autograd adds up several (tied weights), some
entries of the sum are compared with those of its parts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.hooks import RemovableHandle

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.device import capturing
from proxpo.ops.shapes import Bool, Float, Int, Tensor

_ENTRIES = 4096
# Rounding of a sum, relative to its terms, with a margin of about ten.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@runtime_checkable
class Audited(Protocol):
    """A parameter under a transform, as its handle shows it."""

    done: bool

    @property
    def parameter(self) -> Tensor: ...


class Audit:
    """Gradients sent to and received by each parameter during one block."""

    def __init__(self, handles: Mapping[str, Audited]) -> None:
        self.handles = handles
        self._keys: dict[int, int] = {}  # handle -> parameter
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._unsent: set[int] = set()
        self._compared: list[tuple[int, Bool[Tensor, ""]]] = []
        self._shards: dict[int, tuple[Tensor, tuple[int, int] | None]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what arrives at the parameters while the block is open."""
        handles = [(handle, handle.parameter) for handle in self.handles.values()]
        self._keys = {id(handle): id(parameter) for handle, parameter in handles}
        parameters = {id(parameter): parameter for _, parameter in handles}
        shards = {key: p for key, p in parameters.items() if hasattr(p, "device_mesh")}
        self._shards = {key: (p, _mark(p)) for key, p in shards.items()}
        hooks = [
            _hook_first(parameter, partial(self._receive, key))
            for key, parameter in parameters.items()
            if key not in shards  # what arrives there has another shape
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def send(self, handle: Audited, gradient: Tensor) -> None:
        """Registers a tensor that is about to be returned to autograd as a gradient."""
        key = self._keys.get(id(handle)) or id(handle.parameter), _task()
        if key not in self._sent:
            self._sent[key] = _Sent(gradient)
            return
        sent = self._sent[key]
        if capturing():  # nothing can be compared
            sent.whole = None
            return
        if sent.whole is not None:
            # A second reference to it would keep autograd from adding the others in place.
            sent.parts.append(some_entries(sent.whole))
            sent.whole = None
        sent.parts.append(some_entries(gradient))

    def _receive(self, key: int, gradient: Tensor | None) -> None:
        if gradient is None:  # while another call of the module is still to come
            return
        sent = self._sent.pop((key, _task()), None)
        if sent is None:
            self._unsent.add(key)
        elif sent.whole is not gradient and not capturing():
            parts = sent.parts if sent.whole is None else [some_entries(sent.whole)]
            self._compared.append((key, _differ(some_entries(gradient), parts, gradient.dtype)))

    def check(self) -> None:
        """Raises for a parameter whose gradient is not, or not only, what its handles returned."""
        if not (self._unsent or self._compared or self._shards):
            return
        names = {self._keys[id(handle)]: name for name, handle in self.handles.items()}
        done = {self._keys[id(handle)] for handle in self.handles.values() if handle.done}
        changed = {key for key, (p, before) in self._shards.items() if _mark(p) != before}
        for key in (key for key in names if key in self._unsent or key in changed - done):
            raise ProxpoError(
                f"gradients.applied: {names[key]} received a gradient that did not pass through "
                "the transform (forward outside the `with` block, or its weight used without "
                "calling the module); p.grad must not be used"
            )
        if not self._compared:
            return
        wrong = torch.stack([bad.cpu() for _, bad in self._compared]).tolist()
        for (key, _), bad in zip(self._compared, wrong):
            if bad:
                raise ProxpoError(
                    f"gradients.applied: {names[key]} received a gradient that did not pass "
                    "through the transform: its weight is also used without calling the module; "
                    "p.grad must not be used"
                )


class _Sent:
    """Gradients of one parameter that one backward pass has not delivered yet."""

    __slots__ = ("parts", "whole")

    def __init__(self, whole: Tensor) -> None:
        self.whole: Tensor | None = whole
        self.parts: list[Tensor] = []


def _hook_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Registers a hook that runs before those of the user, which may change the gradient."""
    handle = parameter.register_hook(hook)
    hooks: Any = parameter._backward_hooks  # read as a dict, whatever `move_to_end` says
    for other in [number for number in hooks if number != handle.id]:
        hooks[other] = hooks.pop(other)
    return handle


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    """Identity and version of the parameter's gradient."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _task() -> int:
    """Number of the running backward pass: nested ones deliver apart from the outer one."""
    return torch._C._current_graph_task_id()


def _differ(
    received: Float[Tensor, " some"], parts: list[Float[Tensor, " some"]], kind: torch.dtype
) -> Bool[Tensor, ""]:
    """True where a sum differs from its parts by more than rounding."""
    terms = torch.stack(parts)
    # Not `>=`: what is not a number is for the check of the weights to name.
    return (received - terms.sum(0)).norm() > TOLERANCE.get(kind, 5e-2) * terms.norm()


def some_entries(gradient: Tensor) -> Float[Tensor, " some"]:
    """Fixed selection of entries, without a copy of the rest."""
    gradient, size = gradient.detach(), gradient.numel()
    if size <= _ENTRIES:
        return gradient.flatten().double()
    index = _selection(size, gradient.device)
    if gradient.is_contiguous():
        return gradient.view(-1).index_select(0, index).double()
    return gradient[torch.unravel_index(index, gradient.shape)].double()


@lru_cache(maxsize=16)
def _selection(size: int, device: torch.device) -> Int[Tensor, " some"]:
    generator = torch.Generator(device=device).manual_seed(size)
    return torch.randint(size, (_ENTRIES,), generator=generator, device=device)
