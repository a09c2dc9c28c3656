"""Verifies once per model that its layers see the positions in the order of `sequences`.

A layer that gets them in another order (rows sorted by length, rolled, tokens sorted by expert)
would give the gradient of one sequence the weight of another, and shapes do not show it. So
before its first forward with several sequences a model is run without gradient and watched for
operations that can move positions: sorts, rolls, flips, indices, parts put together. A model with
any of them is run four times more: as it is, and with the embeddings of every second sequence
changed (of every second pair, of every second four). What enters a layer must change at the
positions of these sequences; where it changes elsewhere instead, the model is refused. Not seen: an
order that leaves that micro-batch as it is, a product with a permutation matrix, sharded and
compiled models.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.device import capturing
from proxpo.gradients._engine.position_axes import flatten_positions, position_axes
from proxpo.gradients._engine.replay import ReplayState, buffers_of, with_buffers
from proxpo.gradients._engine.session import Session
from proxpo.ops.shapes import Bool, Float, Tensor

_MARKS = 3  # bits of a sequence's number
_WIDTH = 4  # numbers kept of the features of a position
Prints = dict[tuple[str, int], Float[Tensor, "pos some"]]


class OrderCheck:
    """The check of one model, made in the first block that can show something."""

    def __init__(self, model: nn.Module, opaque: Collection[nn.Module]) -> None:
        """opaque: modules whose own code may use their parameters in any order"""
        self.done = False
        self._opaque = {id(module) for module in opaque}
        self._sharded = any(hasattr(p, "device_mesh") for p in model.parameters())

    def call(
        self, root: nn.Module, call: Callable[..., Any], session: Session, args: Any, kwargs: Any
    ) -> Any:
        """The forward `call` of a model on these inputs; refuses one that reorders positions."""
        if self.done or self._sharded or session.padded is not None or capturing():
            return call(*args, **kwargs)
        if not session.layout.alone or sum(map(bool, session.layout.lengths)) < 2:
            return call(*args, **kwargs)
        self.done = True
        before, moves = ReplayState(session, (args, kwargs)), _Moves(session)
        try:
            with torch.no_grad(), with_buffers(buffers_of(root)), moves:
                call(*args, **kwargs)
        except RuntimeError:  # a forward that only runs with gradient, such as one with hooks
            moves.found = False
        finally:
            before.restore()
        if moves.found:
            self._verify(root, call, session, args, kwargs)
        # The last run is the one with gradient: callers keep what they take from it by hooks.
        return call(*args, **kwargs)

    @torch.no_grad()
    def _verify(
        self, root: nn.Module, call: Callable[..., Any], session: Session, args: Any, kwargs: Any
    ) -> None:
        layout = session.layout
        names = {
            part._parameters[own].untyped_storage().data_ptr(): handle.name  # type: ignore[union-attr]
            for handle in session.handles.values()
            for part, own in ((handle.module, handle.attribute),)
            if part._parameters.get(own) is not None
        }

        def prints(marked: Bool[Tensor, "..."] | None) -> Prints:
            before = ReplayState(session, (args, kwargs))
            watch = _Watch(session, names, marked)
            try:
                with ExitStack() as stack:
                    stack.enter_context(with_buffers(buffers_of(root)))
                    for module in root.modules():
                        if id(module) in self._opaque and module is not root:
                            stack.enter_context(watch.outside(module))
                    inputs = tree_map(watch.mark_input, (args, kwargs))
                    with watch:
                        out = call(*inputs[0], **inputs[1])
                watch.keep("the model's output", tree_leaves(out)[:1])
            finally:
                before.restore()
            return watch.prints

        try:
            plain = prints(None)
            numbers = layout.seq.view(session.shape)
            for bit in range(_MARKS):
                marked = (numbers >= 0) & (numbers.bitwise_right_shift(bit) & 1 == 0)
                if not bool(marked.any()) or bool((marked == (numbers >= 0)).all()):
                    continue
                _compare(plain, prints(marked), marked.reshape(-1), numbers.reshape(-1) >= 0)
        except ProxpoError:
            raise
        except Exception:  # code that cannot run twice; its gradients are as before
            return


def _compare(
    plain: Prints, changed: Prints, marked: Bool[Tensor, " pos"], real: Bool[Tensor, " pos"]
) -> None:
    """Refuses prints that change at other positions and not at those of marked sequences."""
    wrong: list[tuple[str, Tensor]] = []
    for key in plain.keys() & changed.keys():
        before, after = plain[key], changed[key]
        if before.shape != after.shape:
            continue
        change = (after - before).norm(dim=1)
        size = change.max()
        moved = (change > 0.1 * size) & ~marked & real
        kept = (change < 1e-3 * size) & marked
        large = size > 1e-3 * before.square().mean().sqrt()
        wrong.append((key[0], moved.any() & kept.any() & large))
    flags = torch.stack([flag for _, flag in wrong]).tolist() if wrong else []
    for name in [name for (name, _), flag in zip(wrong, flags) if flag][:1]:
        raise ProxpoError(
            f"gradients.applied: {name} sees the positions in another order than `sequences` (rows "
            "or tokens are sorted, rolled or reversed on the way to it), so that its gradients "
            "would go to other sequences; keep the order, or freeze what lies behind it with "
            "requires_grad_(False)"
        )


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ORDERS = _names(
    "sort argsort msort topk randperm one_hot searchsorted roll flip fliplr flipud rot90"
)
_MOVES = _names(
    "index_select gather take take_along_dim masked_select masked_scatter index_put index_put_ "
    "index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_"
)
_JOINS = _names("cat concat concatenate stack vstack hstack")


class _Moves(TorchFunctionMode):
    """Looks for an operation that may move positions; it may as well put them where they were."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.found = session, False

    @no_type_check
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.found and args:
            with torch._C.DisableTorchFunction():
                self.found = self._may_move(getattr(func, "__name__", ""), args, out)
        return out

    def _may_move(self, name: str, args: Any, out: Any) -> bool:
        if name in _ORDERS:
            return True
        if name in _JOINS:
            parts = [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]
            return self._shows(out) and not all(map(self._shows, parts))
        if name in ("__getitem__", "__setitem__"):
            indices = tree_leaves(args[1])
            return any(isinstance(x, Tensor) for x in indices) and self._shows(args[0])
        return name in _MOVES and self._shows(args[0])

    def _shows(self, x: Any) -> bool:
        """True where x may hold the positions: their numbers, or features of each."""
        if not isinstance(x, Tensor) or x.dim() == 0:
            return False
        if x.shape == self.session.shape:
            return True
        try:
            position_axes(tuple(x.shape[:-1]), self.session.shape, "")
        except ProxpoError:
            return False
        return True


class _Watch(TorchFunctionMode):
    """Keeps a few numbers of each position of what meets a trained parameter."""

    def __init__(
        self, session: Session, names: dict[int, str], marked: Bool[Tensor, "..."] | None
    ) -> None:
        super().__init__()
        self.session, self.names, self.marked = session, names, marked
        self.prints: Prints = {}
        self._counts: dict[str, int] = {}
        self._inside = 0

    @contextmanager
    def outside(self, module: nn.Module) -> Iterator[None]:
        """Looks at what enters and leaves a module, not at its own code."""
        own = vars(module).get("forward")
        inner = module.forward
        name = next((n for n in self.names.values() if n), "a module")
        for handle in self.session.handles.values():
            if handle.module is module:
                name = handle.name

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                out = inner(*args, **kwargs)
            finally:
                self._inside -= 1
            if not self._inside:
                self.keep(name, tree_leaves(out)[:1])
            return out

        vars(module)["forward"] = forward
        try:
            yield
        finally:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own

    def mark_input(self, x: Any) -> Any:
        """Embeddings that the model is given, changed at the marked positions."""
        given = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1
        return self._changed(x) if given and x.shape[:-1] == self.session.shape else x

    @no_type_check
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # other modes are to see the model alone
            return self._seen(func, args, kwargs, out)

    def _seen(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The result of an operation of the model, its operands kept; changed embeddings."""
        if func is F.embedding and args[0].shape == self.session.shape:
            return self._changed(out)
        if self._inside or not isinstance(out, Tensor):
            return out
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
        if len(tensors) > 1:
            known = [self.names.get(x.untyped_storage().data_ptr()) for x in tensors]
            name = next(filter(None, known), None)
            if name is not None:
                self.keep(name, [x for x, its in zip(tensors, known) if its is None])
        return out

    def keep(self, name: str, inputs: list[Any]) -> None:
        """Keeps the prints of tensors whose leading axes show the positions."""
        for x in inputs:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
                continue
            try:
                rows, _ = flatten_positions(x, self.session.shape, name)
            except ProxpoError:
                continue
            number = self._counts[name] = self._counts.get(name, 0) + 1
            draws = _draws(rows.shape[1], rows)
            found = (rows.to(draws.dtype) @ draws).nan_to_num()
            self.prints[name, number] = found.reshape(self.session.layout.size, -1)

    def _changed(self, x: Float[Tensor, "*lead wide"]) -> Float[Tensor, "*lead wide"]:
        if self.marked is None:
            return x
        noise = _draws(x.shape[-1], x)[:, 0] * x.detach().float().std()
        return x + self.marked[..., None] * noise.to(x.dtype)


def _draws(width: int, like: Tensor) -> Float[Tensor, "wide some"]:
    """Fixed random numbers."""
    draw = torch.Generator().manual_seed(width)
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.randn(width, _WIDTH, generator=draw).to(like.device, kind)
