"""Proxies of a module's own parameters, which follow them to their use while its forward runs.

A proxy follows a matrix through views and casts (`.T`, `w[:k]`, `w.float()`) to the product it
takes part in, and a vector to the sum or product with the activations. Operations without a
per-sequence form raise `UnsupportedUse`; the caller then runs the module in another way. A use
that no operation of torch shows (a custom autograd function) meets a guard in the backward pass,
which refuses it. Therefore no use of a parameter can lose its gradient silently.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.matrices import EmbeddingLayer, LinearLayer
from proxpo.gradients._engine.session import ModuleHandle, Session
from proxpo.gradients._engine.vectors import VectorCall, expand
from proxpo.ops.shapes import Tensor


class UnsupportedUse(BaseException):
    """A parameter was used by an operation that has no per-sequence form.

    Not an Exception: a model that catches those around an operation must not catch this.
    """


@dataclass
class TrackedParameter:
    """A parameter of a tracked module: its value, its name there, and its module handle."""

    session: Session
    module_handle: ModuleHandle
    attribute: str
    value: Tensor
    inside: bool = True  # while the module's forward runs

    @property
    def name(self) -> str:
        return self.module_handle.handles[self.attribute].name


class ParameterProxy(torch.Tensor):
    """A parameter, or a part of it after views and casts."""

    tracked: TrackedParameter
    source: Tensor  # the same views of the parameter itself, without the casts

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _property(func, args[0])
        if name in _FACTS or not torch.is_grad_enabled():
            return _values(func, args, kwargs)
        this = args[0] if args and isinstance(args[0], ParameterProxy) else None
        if this is not None and name in _CASTS:
            return _derived(this, this.source, func, args, kwargs)
        if this is not None and name in _VIEWS and not _by_tensor(args[1:]):
            view = func(this.source, *args[1:], **kwargs)
            return _derived(this, view, func, args, kwargs)
        _stay_inside(args, kwargs)
        use = _USES.get(func)
        if use is None:
            raise UnsupportedUse(name or str(func))
        try:
            return use(func, args, kwargs)
        except ProxpoError as why:  # the other operand does not show the positions
            raise UnsupportedUse(name) from why


def proxy_of(tracked: TrackedParameter) -> ParameterProxy:
    """Proxy of a whole parameter."""
    guarded = _Guard.apply(tracked.value, tracked.name)
    made: Any = guarded.as_subclass(ParameterProxy)
    made.tracked, made.source = tracked, tracked.value.detach()
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
    if not isinstance(x, ParameterProxy):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(torch.Tensor)


def _stay_inside(args: Any, kwargs: Any) -> None:
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ParameterProxy) and not x.tracked.inside:
            raise ProxpoError(
                f"gradients.applied: {x.tracked.name} is handed out by its module and used "
                "elsewhere, which has no per-sequence form; freeze it with requires_grad_(False)"
            )


def _by_tensor(args: Any) -> bool:
    """True where a view depends on a tensor: an index, or (view_as) a shape."""
    return any(isinstance(x, torch.Tensor) for x in tree_leaves(args))


def _property(func: Any, this: ParameterProxy) -> Any:
    """Facts such as shape and requires_grad; views such as T."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "grad":
        return this.tracked.value.grad
    if name == "data" or (name in _VIEW_PROPERTIES and not torch.is_grad_enabled()):
        return _values(func, (this,), {})
    if name in _VIEW_PROPERTIES:
        return _derived(this, func(this.source), func, (this,), {})
    with torch._C.DisableTorchFunctionSubclass():
        fact = func(this)
    if isinstance(fact, torch.Tensor):
        raise UnsupportedUse(name)
    return fact


def _derived(origin: ParameterProxy, view: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Proxies of a view or a cast, behind the guard of their origin."""
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = func(*args, **kwargs)
    if isinstance(made, list | tuple):  # chunk, split, unbind
        return type(made)(_child(origin, m, s) for m, s in zip(made, view))
    if isinstance(made, torch.Tensor):
        return _child(origin, made, view)
    return made  # type() without a dtype is a string


def _child(origin: ParameterProxy, value: Tensor, view: Tensor) -> ParameterProxy:
    made: Any = value.as_subclass(ParameterProxy)
    made.tracked, made.source = origin.tracked, view
    return made


class _Block(NamedTuple):
    """A rectangle of a matrix, perhaps transposed."""

    rows: slice
    columns: slice
    transposed: bool


def _block(matrix: ParameterProxy) -> _Block:
    """The rectangle of its parameter that a proxy shows, read off the strides."""
    whole, part = matrix.tracked.value, matrix.source
    if whole.dim() != 2 or part.dim() != 2 or not whole.is_contiguous() or not _aliased(matrix):
        raise UnsupportedUse("view")
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
    raise UnsupportedUse("view")


def _aliased(part: ParameterProxy) -> bool:
    whole = part.tracked.value.untyped_storage()
    return part.source.untyped_storage().data_ptr() == whole.data_ptr()


def _multiply(x: Any, matrix: ParameterProxy, *, flip: bool) -> Tensor:
    """x Mᵀ for the matrix M of a proxy; x M with `flip`."""
    if not isinstance(x, torch.Tensor) or isinstance(x, ParameterProxy) or x.dim() < 1:
        raise UnsupportedUse("product")
    rows, columns, transposed = _block(matrix)
    tracked = matrix.tracked
    part = None
    if matrix.source.numel() != tracked.value.numel():
        part = (rows, columns)
    layer = LinearLayer(
        tracked.session,
        tracked.module_handle,
        transposed=transposed != flip,
        weight=tracked.attribute,
        part=part,
    )
    return layer(x, tracked.value)


def _repeated(vector: ParameterProxy, lead: tuple[int, ...]) -> Tensor:
    """A vector, once for every position."""
    tracked, view = vector.tracked, vector.source
    flat = tracked.value.dim() == 1 and _aliased(vector) and view.dim() > 0
    if not flat or tuple(view.shape) != (1,) * (view.dim() - 1) + tuple(tracked.value.shape):
        raise UnsupportedUse("view")
    vectors = VectorCall(tracked.session, {tracked.attribute: tracked.module_handle}, lead)
    return expand(tracked.value, lead, tracked.attribute, vectors).to(vector.dtype)


def _added(x: Tensor, bias: Any) -> Tensor:
    if isinstance(bias, ParameterProxy):
        bias = _repeated(bias, tuple(x.shape[:-1]))
    return x if bias is None else x + bias


def _linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _linear_of(*args, **kwargs)


def _linear_of(input: Any, weight: Any, bias: Any = None) -> Tensor:
    if isinstance(weight, ParameterProxy):
        return _added(_multiply(input, weight, flip=False), bias)
    if isinstance(input, ParameterProxy):
        raise UnsupportedUse("linear")
    return _added(F.linear(input, weight), bias)


def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _matmul_of(*args, **kwargs)


def _matmul_of(input: Any, other: Any) -> Tensor:
    if isinstance(other, ParameterProxy):
        return _multiply(input, other, flip=True)
    if other.dim() < 2:
        raise UnsupportedUse("matmul")
    return _multiply(other.mT, input, flip=False).mT  # positions are columns


def _rmatmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _matmul_of(args[1], args[0])


def _addmm(func: Any, args: Any, kwargs: Any) -> Tensor:
    if kwargs or len(args) != 3:  # beta and alpha
        raise UnsupportedUse("addmm")
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
        raise UnsupportedUse("embedding")
    rows, _, transposed = _block(weight)
    if transposed or weight.source.shape != weight.tracked.value.shape:
        raise UnsupportedUse("embedding")
    tracked = weight.tracked
    padding = padding_idx if padding_idx is None or padding_idx >= 0 else rows.stop + padding_idx
    layer = EmbeddingLayer(tracked.session, tracked.module_handle, tracked.attribute, padding)
    return layer(input, tracked.value).to(weight.dtype)


def _getitem(func: Any, args: Any, kwargs: Any) -> Tensor:
    """w[ids]: an embedding."""
    this, index = args
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    integers = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32)
    if not isinstance(this, ParameterProxy) or not integers:
        raise UnsupportedUse("__getitem__")
    return _lookup(index, this)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A vector against activations, last axis against last axis."""
    if kwargs or len(args) != 2 or all(isinstance(x, ParameterProxy) for x in args):
        raise UnsupportedUse(func.__name__)
    ((x, vector),) = (pair for pair in (args, args[::-1]) if isinstance(pair[1], ParameterProxy))
    if vector.dim() == 0:
        raise UnsupportedUse(func.__name__)
    same = isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] == vector.shape[-1]
    if not same or vector.dim() > x.dim():
        raise UnsupportedUse(func.__name__)
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
