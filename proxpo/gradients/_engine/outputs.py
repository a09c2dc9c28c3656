"""Tensors that leave a module: in what it returns, or by another way (an attribute, a list)."""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor

_PLAIN = (Tensor, nn.Module, str, bytes, int, float, complex, type(None), torch.dtype)
_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, children, hooks


def floating(out: Any) -> list[Tensor]:
    """The floating tensors in what a module returned, in a fixed order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with_floating(out, keep)
    return tensors


def with_floating(out: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Replaces the floating tensors in what a module returned; objects are copied."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return replace(value) if value.is_floating_point() else value
        names = _field_names(value)
        if not names:
            return value
        made = copy.copy(value)
        for name in names:
            part = with_floating(getattr(value, name), replace)
            object.__setattr__(made, name, part)  # also where the class is frozen
        return made

    return tree_map(leaf, out)


def _field_names(value: Any) -> list[str]:
    """Names of the fields of a dataclass or a namespace; none for other objects."""
    if isinstance(value, SimpleNamespace):
        return list(vars(value))
    if not is_dataclass(value) or isinstance(value, type | nn.Module):
        return []
    return [field.name for field in fields(value) if hasattr(value, field.name)]


def containers(value: Any, visited: set[int] | None = None) -> Iterator[Any]:
    """Lists and dicts within a value, also those that hold the attributes of objects."""
    visited = set() if visited is None else visited
    if isinstance(value, _PLAIN) or callable(value) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, dict):
        parts: Any = list(value.values())
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [getattr(value, "__dict__", None)]
    for part in parts:
        yield from containers(part, visited)


def guard_others(
    module: nn.Module, inputs: tuple[Any, Any], constants: Collection[Tensor], refusal: str
) -> None:
    """Refuses gradients of results that leave a module otherwise than as its return value.

    Results of `constants` are looked for in the lists, dicts and objects among the inputs and in
    the attributes of the module and of those below. They are replaced by copies that raise in the
    backward pass: to store a result for a log is no mistake.
    """
    depends = _dependence({constant.grad_fn for constant in constants})
    args, kwargs = inputs
    if any(depends(value) for value in (*args, *kwargs.values())):  # changed in place
        raise ProxpoError(refusal)

    def guarded(value: Any) -> Any:
        return _Refused.apply(value, refusal) if depends(value) else value

    for place in [*containers((args, tuple(kwargs.values()))), *_attributes(module)]:
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if not isinstance(value, Tensor | tuple):
                continue
            if any(depends(leaf) for leaf in tree_leaves(value)):
                place[key] = tree_map(guarded, value)


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Dicts of the attributes of a module and of those below, and the lists and dicts in them."""
    for owner in module.modules():
        yield vars(owner)
        for name, value in vars(owner).items():
            if name not in _OF_TORCH and isinstance(value, list | dict):
                yield value


def _dependence(ends: Collection[Any]) -> Callable[[Any], bool]:
    """A function that is true for tensors whose graph leads to one of the nodes `ends`."""
    oldest = min((node._sequence_nr() for node in ends), default=0)
    apart = set[Any]()  # nodes that do not lead there

    def depends(value: Any) -> bool:
        todo = [value.grad_fn] if isinstance(value, Tensor) and value.requires_grad else []
        visited = set[Any]()
        while todo:
            node: Any = todo.pop()
            if node in ends:
                return True
            if node is None or node in visited or node in apart:
                continue
            visited.add(node)
            if node._sequence_nr() >= oldest:  # an older node cannot lead to them
                todo += [below for below, _ in node.next_functions]
        apart.update(visited)
        return False

    return depends


class _Refused(torch.autograd.Function):
    """A copy, with a refusal for any gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, refusal: str) -> Tensor:
        ctx.refusal = refusal
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ProxpoError(ctx.refusal)
