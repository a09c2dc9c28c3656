"""The input of the linear layers called last, which several of them may multiply (q, k, v)."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from proxpo.gradients._engine.position_gradients import SharedInput
from proxpo.ops.shapes import Tensor


class _Known(NamedTuple):
    source: ref[Tensor]
    version: int
    value: ref[Tensor]  # cast as autocast does
    shared: SharedInput
    layers: list[Any]


class LastInput:
    """The input of the linear layers called last, as long as it exists and is not changed."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def cast(
        self, x: Tensor, cast: Callable[[Tensor], Tensor], layer: Any, handle: Any
    ) -> tuple[Tensor, SharedInput]:
        """The cast input of a layer, and what it shares with the layers before, if that is theirs.

        handle: of the layer's weight; that of the first layer leads
        """
        last = self._known
        if last is not None and last.source() is x and last.version == x._version:
            value = last.value()
            if value is not None and layer not in last.layers:
                last.shared.layers += 1
                last.layers.append(layer)
                return value, last.shared
        value, shared = cast(x), SharedInput(handle)
        self._known = _Known(ref(x), x._version, ref(value), shared, [layer])
        return value, shared
