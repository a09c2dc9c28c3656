"""Order in which a model's layers see the two axes of `sequences`.

Lengths tell B x L from L x B, unless they are equal. A model is known to keep the order once a
block with B ≠ L has passed. Until then its forward is watched: a tensor of positions whose axes are
exchanged leaves B = L open, and so does a module of torch that is built for the other order; both
are refused. With B ≠ L the same goes for L x B flattened into one axis.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, no_type_check

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Int, Tensor


class AxisOrder:
    """Order of axes in one model; `known` once its layers are seen to keep that of `sequences`."""

    def __init__(self, model: nn.Module) -> None:
        self.known = False
        self._compiled = any(
            hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            for module in model.modules()
        )
        self._declared = {
            name: module.batch_first
            for name, module in model.named_modules()
            if isinstance(getattr(module, "batch_first", None), bool)
        }

    @contextmanager
    def watched(self, sequences: Int[Tensor, "..."]) -> Iterator[None]:
        """Refuses a forward in the block that leaves the order open."""
        wide = tuple(length for length in sequences.shape if length != 1)
        if self.known or len(wide) != 2:
            yield
            return
        square = wide[0] == wide[1]
        if square:
            self._check_modules(sequences.reshape(wide))
        if self._compiled and not square:  # compiled anew with a watch, and again without
            yield
        else:
            with _OrderWatch(wide):
                yield
        self.known = not square

    def _check_modules(self, sequences: Int[Tensor, "n n"]) -> None:
        rows, columns = (_constant(x) for x in (sequences, sequences.T))
        batch_first = rows or not columns
        for name, declared in self._declared.items():
            if declared != batch_first:
                raise ProxpoError(
                    f"gradients.applied: {name or 'the model'} has batch_first={declared}, and "
                    f"{_ambiguous(len(sequences), 'batch_first=True in the layers')}"
                )


class _OrderWatch(TorchFunctionMode):
    """Refuses a forward that uses a parameter after an exchange of the axes of positions."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        self.exchanged = False

    @no_type_check  # a wrapper's frame would come between it and its caller
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self.exchanged and _uses_parameter(func, [*args, *kwargs.values()]):
            raise ProxpoError(self._refusal())
        out = func(*args, **kwargs)
        if args and _plain(args[0]) and _plain(out) and not self.exchanged:
            changes_order = _exchanged if self.shape[0] == self.shape[1] else _flattened
            self.exchanged = changes_order(args[0], out, self.shape) and not _own_code()
        return out

    def _refusal(self) -> str:
        rows, columns = self.shape
        if rows == columns:
            return (
                "gradients.applied: the model exchanges the axes of its positions, and "
                + _ambiguous(rows, "layers that all see B x L")
            )
        return (
            f"gradients.applied: the model flattens its positions in the order {columns} x {rows}, "
            f"where `sequences` has {rows} x {columns}; it needs layers that see B x L"
        )


def _uses_parameter(func: Any, arguments: list[Any]) -> bool:
    """True where a layer of the forward runs: no backward, no mere reading of an attribute."""
    layer = any(isinstance(x, nn.Parameter) for x in arguments)
    reads = getattr(func, "__name__", "") == "__get__"
    return layer and not reads and torch._C._current_graph_task_id() == -1


def _plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, nn.Parameter)


def _positions(x: Tensor, shape: tuple[int, int]) -> bool:
    """Hidden states or token numbers with these leading axes; a matrix of floats is a weight."""
    return x.shape[:2] == shape and (x.dim() > 2) == x.is_floating_point()


def _exchanged(x: Tensor, out: Tensor, shape: tuple[int, int]) -> bool:
    """True where `out` is a view of the positions with the second axis before the first.

    Operations that do this differ in name; what they have in common are the strides.
    """
    if not _positions(x, shape) or out.dim() < 2 or out.data_ptr() != x.data_ptr():
        return False
    first, second = x.stride()[:2]
    strides = out.stride()
    both = first != second and first in strides and second in strides
    return both and strides.index(second) < strides.index(first)


def _flattened(x: Tensor, out: Tensor, shape: tuple[int, int]) -> bool:
    """True where `out` has in one axis the positions that `x` has in two exchanged ones."""
    whole = (shape[0] * shape[1],)
    return _positions(x, shape[::-1]) and out.shape[:1] == whole and x.shape[:1] != whole


@no_type_check
def _own_code() -> bool:
    """True inside torch's own modules: attention exchanges axes and puts them back."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "proxpo":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.nn.")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).split(".")[0]


def _constant(rows: Int[Tensor, "n n"]) -> bool:
    """True where every row holds one number, or padding."""
    return bool(((rows == rows.amax(dim=1, keepdim=True)) | (rows < 0)).all())


def _ambiguous(n: int, wanted: str) -> str:
    """Message for a square `sequences`, whose axes look alike."""
    return (
        f"`sequences` of {n} x {n} does not tell sequences from positions; it needs {wanted}, or "
        "one more column of padding"
    )
