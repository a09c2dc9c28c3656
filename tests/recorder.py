"""A recorder for the CPU: keeps the operations of a function and repeats them, without its Python.

It stands for a CUDA graph. What reads a value from the device, or draws random numbers, is refused,
as it would be there; so a replay that gives the right numbers has read them from buffers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.bincount, aten.masked_select, aten.equal}
EMPTY = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}


class Operations(TorchDispatchMode):
    """The operations that run while it is active, with the tensors they read and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, draws = func.overloadpacket, torch.Tag.nondeterministic_seeded in func.tags
        if kind in WAITS or (draws and "attention" not in func.name()):
            raise RuntimeError(f"{func} cannot be recorded")
        inputs = _aliases((args, kwargs))  # before an operation that changes shapes in place
        out = func(*args, **kwargs)
        if kind not in EMPTY:
            self.calls.append((func, *inputs, _aliases(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for before, now in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(now, Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def _aliases(tree: Any) -> Any:
    """The same memory in tensors of their own."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def record(function: Callable[[], None]) -> Callable[[], None]:
    """Runs the function once and returns its operations as a function."""
    with Operations() as operations:
        function()
    return operations.replay
