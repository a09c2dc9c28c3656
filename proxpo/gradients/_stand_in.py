"""Tensors that stand for a module's own parameters while its forward runs.

A stand-in follows a matrix through views and casts (`.T`, `w[:k]`, `w.float()`) to the product it
takes part in, and a vector to the sum or product with the activations. Operations without a
per-sequence form raise `Unfamiliar`; the caller then runs the module in another way. A use that no
operation of torch shows (a custom autograd function) meets a guard in the backward pass, which
refuses it. Therefore no use of a parameter can lose its gradient without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from proxpo.errors import ProxpoError
from proxpo.gradients._functions import Linear, Shared, embedding, expand
from proxpo.gradients._session import Session, Unit
from proxpo.ops.shapes import Tensor


class Unfamiliar(BaseException):
    """A parameter was used by an operation that has no per-sequence form.

    Not an Exception: a model that catches those around an operation must not catch this.
    """


@dataclass
class Own:
    """A parameter of a tracked module: its value, its name there, and its unit."""

    session: Session
    unit: Unit
    attribute: str
    value: Tensor
    inside: bool = True  # while the module's forward runs

    @property
    def name(self) -> str:
        return self.unit.sites[self.attribute].name


class StandIn(torch.Tensor):
    """A part of a parameter, seen through views and casts."""

    own: Own
    shown: Tensor  # the same views of the parameter itself, without the casts

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _property(func, args[0])
        if name in _FACTS or not torch.is_grad_enabled():
            return _values(func, args, kwargs)
        this = args[0] if args and isinstance(args[0], StandIn) else None
        if this is not None and name in _CASTS:
            return _derived(this, this.shown, func, args, kwargs)
        if this is not None and name in _VIEWS and not _by_tensor(args[1:]):
            shown = func(this.shown, *args[1:], **kwargs)
            return _derived(this, shown, func, args, kwargs)
        _stay_inside(args, kwargs)
        use = _USES.get(func)
        if use is None:
            raise Unfamiliar(name or str(func))
        try:
            return use(func, args, kwargs)
        except ProxpoError as why:  # the other operand does not show the positions
            raise Unfamiliar(name) from why


def stand_in(own: Own) -> StandIn:
    """A stand-in for a whole parameter."""
    guarded = _Guard.apply(own.value, own.name)
    made: Any = guarded.as_subclass(StandIn)
    made.own, made.shown = own, own.value.detach()
    made._is_param = True  # so that isinstance(…, nn.Parameter) is as ever
    return made


class _Guard(torch.autograd.Function):
    """The identity, with a refusal for any gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ProxpoError(
            f"gradients.applied: {ctx.name} is used by a custom autograd function or kernel inside "
            "its module, which has no per-sequence form; freeze it with requires_grad_(False)"
        )


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Read without gradient, as in any forward.
_FACTS = _names(
    "size dim ndimension numel nelement stride is_floating_point is_complex is_contiguous "
    "element_size storage_offset get_device __len__ __repr__ __format__ __hash__ detach "
    "is_same_size __bool__ item tolist"
)
_CASTS = _names("to type type_as float double half bfloat16 contiguous clone cuda cpu")
_VIEWS = _names(
    "t transpose swapaxes swapdims permute movedim moveaxis adjoint view reshape flatten unflatten "
    "squeeze unsqueeze narrow select chunk split split_with_sizes tensor_split unbind __getitem__"
)
_VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH"})


def _values(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on values alone."""
    args, kwargs = tree_map(_value, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)


def _value(x: Any) -> Any:
    if not isinstance(x, StandIn):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(torch.Tensor)


def _stay_inside(args: Any, kwargs: Any) -> None:
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, StandIn) and not x.own.inside:
            raise ProxpoError(
                f"gradients.applied: {x.own.name} is handed out by its module and used elsewhere, "
                "which has no per-sequence form; freeze it with requires_grad_(False)"
            )


def _by_tensor(args: Any) -> bool:
    """Whether a view is asked for by a tensor: an index, or (view_as) a shape."""
    return any(isinstance(x, torch.Tensor) for x in tree_leaves(args))


def _property(func: Any, this: StandIn) -> Any:
    """Facts such as shape and requires_grad; views such as T."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "grad":
        return this.own.value.grad
    if name == "data" or (name in _VIEW_PROPERTIES and not torch.is_grad_enabled()):
        return _values(func, (this,), {})
    if name in _VIEW_PROPERTIES:
        return _derived(this, func(this.shown), func, (this,), {})
    with torch._C.DisableTorchFunctionSubclass():
        fact = func(this)
    if isinstance(fact, torch.Tensor):
        raise Unfamiliar(name)
    return fact


def _derived(origin: StandIn, shown: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Stand-ins for a view or a cast, behind the guard of their origin."""
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = func(*args, **kwargs)
    if isinstance(made, list | tuple):  # chunk, split, unbind
        return type(made)(_child(origin, m, s) for m, s in zip(made, shown))
    if isinstance(made, torch.Tensor):
        return _child(origin, made, shown)
    return made  # type() without a dtype is a string


def _child(origin: StandIn, value: Tensor, shown: Tensor) -> StandIn:
    made: Any = value.as_subclass(StandIn)
    made.own, made.shown = origin.own, shown
    return made


class _Block(NamedTuple):
    """A rectangle of a matrix, perhaps transposed."""

    rows: slice
    columns: slice
    transposed: bool


def _block(matrix: StandIn) -> _Block:
    """The rectangle of its parameter that a stand-in shows, read off the strides."""
    whole, part = matrix.own.value, matrix.shown
    if whole.dim() != 2 or part.dim() != 2 or not whole.is_contiguous() or not _aliased(matrix):
        raise Unfamiliar("view")
    height, width = whole.shape
    start = int(part.storage_offset()) - int(whole.storage_offset())
    top, left = divmod(start, max(1, width))
    for transposed in (False, True):
        shape, steps = (tuple(x) for x in (part.shape, part.stride()))
        if transposed:
            shape, steps = shape[::-1], steps[::-1]
        fits = top + shape[0] <= height and left + shape[1] <= width
        if fits and all(n == 1 or s == want for n, s, want in zip(shape, steps, (width, 1))):
            return _Block(slice(top, top + shape[0]), slice(left, left + shape[1]), transposed)
    raise Unfamiliar("view")


def _aliased(part: StandIn) -> bool:
    whole = part.own.value.untyped_storage()
    return part.shown.untyped_storage().data_ptr() == whole.data_ptr()


def _multiply(x: Any, matrix: StandIn, *, flip: bool) -> Tensor:
    """x Mᵀ for the matrix M of a stand-in; x M with `flip`."""
    if not isinstance(x, torch.Tensor) or isinstance(x, StandIn) or x.dim() < 1:
        raise Unfamiliar("product")
    rows, columns, transposed = _block(matrix)
    own = matrix.own
    part = None
    if matrix.shown.numel() != own.value.numel():
        part = (rows, columns)
    layer = Linear(
        own.session, own.unit, transposed=transposed != flip, weight=own.attribute, part=part
    )
    return layer(x, own.value)


def _repeated(vector: StandIn, lead: tuple[int, ...]) -> Tensor:
    """A vector, once for every position."""
    own, shown = vector.own, vector.shown
    flat = own.value.dim() == 1 and _aliased(vector) and shown.dim() > 0
    if not flat or tuple(shown.shape) != (1,) * (shown.dim() - 1) + tuple(own.value.shape):
        raise Unfamiliar("view")
    shared = Shared(own.session, {own.attribute: own.unit}, lead)
    return expand(own.value, lead, own.attribute, shared).to(vector.dtype)


def _added(x: Tensor, bias: Any) -> Tensor:
    if isinstance(bias, StandIn):
        bias = _repeated(bias, tuple(x.shape[:-1]))
    return x if bias is None else x + bias


def _linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _linear_of(*args, **kwargs)


def _linear_of(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if isinstance(weight, StandIn):
        return _added(_multiply(input, weight, flip=False), bias)
    if isinstance(input, StandIn):
        raise Unfamiliar("linear")
    return _added(F.linear(input, weight), bias)


def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _matmul_of(*args, **kwargs)


def _matmul_of(input: Any, other: Any) -> Tensor:
    if isinstance(other, StandIn):
        return _multiply(input, other, flip=True)
    if other.dim() < 2:
        raise Unfamiliar("matmul")
    return _multiply(other.mT, input, flip=False).mT  # positions are columns


def _rmatmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _matmul_of(args[1], args[0])


def _addmm(func: Any, args: Any, kwargs: Any) -> Tensor:
    if kwargs or len(args) != 3:  # beta and alpha
        raise Unfamiliar("addmm")
    return _added(_matmul_of(args[1], args[2]), args[0])


def _embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _lookup(*args, **kwargs)


def _lookup(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding with its own signature; the options that change the gradient are not ours."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Unfamiliar("embedding")
    rows, _, transposed = _block(weight)
    if transposed or weight.shown.shape != weight.own.value.shape:
        raise Unfamiliar("embedding")
    own = weight.own
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else rows.stop + padding_idx
    out = embedding(Linear(own.session, own.unit, weight=own.attribute), input, own.value, padding)
    return out.to(weight.dtype)


def _getitem(func: Any, args: Any, kwargs: Any) -> Tensor:
    """w[ids]: an embedding."""
    this, index = args
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    integers = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32)
    if not isinstance(this, StandIn) or not integers:
        raise Unfamiliar("__getitem__")
    return _lookup(index, this)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A vector against activations, last axis against last axis."""
    if kwargs or len(args) != 2 or all(isinstance(x, StandIn) for x in args):
        raise Unfamiliar(func.__name__)
    ((x, vector),) = (pair for pair in (args, args[::-1]) if isinstance(pair[1], StandIn))
    if vector.dim() == 0:
        raise Unfamiliar(func.__name__)
    same = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] == vector.shape[-1]
    if not same or vector.dim() > x.dim():
        raise Unfamiliar(func.__name__)
    wide = _repeated(vector, tuple(x.shape[:-1]))
    return func(*(wide if y is vector else y for y in args))


_USES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.Tensor.__rmatmul__: _rmatmul,
    torch.Tensor.__getitem__: _getitem,
}
_USES |= dict.fromkeys(
    (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__),
    _matmul,
)
_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide")
_OPERATORS = [
    f"__{way}{name}__" for way in ("", "r", "i") for name in ("add", "sub", "mul", "truediv")
]
_USES |= dict.fromkeys(
    [
        *(getattr(torch, name) for name in _ARITHMETIC),
        *(getattr(torch.Tensor, name) for name in (*_ARITHMETIC, *_OPERATORS)),
        *(getattr(torch.Tensor, f"{name}_") for name in _ARITHMETIC),
    ],
    _elementwise,
)
