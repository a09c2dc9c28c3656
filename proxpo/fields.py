"""Shapes and dtypes of the batch fields, and the way from what a user gives to a tensor.

`Batch` and the batch files share this code: the same mistake gets the same line. What has one
meaning is converted: lists, numpy arrays, whole numbers as 0/1 masks or rewards, floats that are
whole numbers as group numbers. Everything else is refused with its name and place. Tensors that
fit are left alone and their values are not looked at.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor

BOOLS = ("mask", "step_end", "correct", "truncated", "void", "refresh", "gate")
INTEGERS = ("tokens", "turn", "group", "prompt_id", "pair")
NUMBERS = ("lag", "group_tokens")  # whole or not
PER_RESPONSE = (
    "rewards",
    "group",
    "prompt_id",
    "greedy_rewards",
    "correct",
    "truncated",
    "void",
    "duration",
    "group_tokens",
    "refresh",
    "pair",
)
PER_VOCABULARY = ("vocab_logp", "old_vocab_logp")
THREE_AXES = {
    **dict.fromkeys(PER_VOCABULARY, "vocabulary"),
    **dict.fromkeys(("hidden", "mean", "old_mean", "ref_mean"), "units"),
}
ROWS = frozenset({"features"})  # two axes, the second of which is not the tokens
SAME_LAST_AXIS = (PER_VOCABULARY, ("hidden", "features"), ("mean", "old_mean", "ref_mean"))
MAY_BE_TEXT = ("group", "tokens")
MAY_BE_MISSING = ("rewards",)  # NaN says so
REWARDS = ("rewards", "greedy_rewards", "token_rewards")  # a variance takes their squares

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_FLAGS = frozenset({torch.bool})
_WHOLE = frozenset({torch.int64})
DTYPES = (
    dict.fromkeys(BOOLS, _FLAGS)
    | dict.fromkeys(INTEGERS, _WHOLE)
    | dict.fromkeys(NUMBERS, _WHOLE | FLOATS)
)
_AXES = (
    dict.fromkeys(PER_RESPONSE, 1)
    | dict.fromkeys(THREE_AXES, 3)
    | dict.fromkeys(ROWS, 0)
    | {"advantages": -1}
)


def fit(given: Mapping[str, Any]) -> bool:
    """All fields are tensors of their dtypes, shapes and of one device. Looks at no value."""
    logp = given["logp"]
    if not isinstance(logp, Tensor) or given["mask"] is None:
        return False
    shape, device = logp.shape, logp.device
    rows = shape[:1]
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.device != device:
            return False
        if value.dtype not in DTYPES.get(name, FLOATS):
            return False
        size, axes = value.shape, _AXES.get(name, 2)
        if axes == 2:
            fitting = size == shape and len(size) == 2
        elif axes == 1:
            fitting = size == rows
        elif axes == 3:
            fitting = size[:2] == shape and len(size) == 3
        elif axes == 0:
            fitting = size[:1] == rows and len(size) == 2
        else:
            fitting = size in (rows, shape)
        if not fitting:
            return False
    return not any(_unlike(given))


def _unlike(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of fields whose last axes should be alike and are not."""
    for names in SAME_LAST_AXIS:
        present = [name for name in names if given.get(name) is not None]
        for name in present[1:]:
            if given[name].shape[-1] != given[present[0]].shape[-1]:
                yield present[0], name


def fitted(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields that are there as tensors that fit, those that fit already untouched.

    Python's numbers and integers get the floating dtype of `logp`, which as a list has float64.
    """
    for name in ("logp", "mask"):
        if given.get(name) is None:
            raise ProxpoError(f"the field '{name}' is missing; every batch needs logp and mask")
    logp = floating(as_tensor("logp", given["logp"]), torch.float64)
    shape = tuple(logp.shape)
    if len(shape) != 2:
        raise ProxpoError(f"logp is {shown(shape)}, expected responses x tokens")
    dtype = torch.promote_types(logp.dtype, torch.float32)
    tensors = {"logp": logp}
    for name, value in given.items():
        if name == "logp" or value is None:
            continue
        tensor = as_tensor(name, value).to(logp.device)
        check_shape(name, tensor, shape)
        plain = isinstance(value, (list, tuple)) and name not in (*BOOLS, *INTEGERS)
        tensors[name] = tensor.to(dtype) if plain else tensor
    for first, name in _unlike(tensors):
        size, shown_size = tensors[first].shape[-1], shown(tuple(tensors[name].shape))
        raise ProxpoError(f"{name} is {shown_size}, but the last axis of {first} is {size}")
    mask = boolean("mask", tensors["mask"], torch.ones_like(logp, dtype=torch.bool))
    return {name: typed(name, value, mask, dtype) for name, value in tensors.items()}


def as_tensor(name: str, value: Any, text: dict[str, list[str]] | None = None) -> Tensor:
    """The value as a tensor of numbers, NaN for null; words of `text` fields get numbers."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ProxpoError(f"{name} holds complex numbers, expected real ones")
        return value
    if hasattr(value, "__array__"):
        import numpy

        array = numpy.array(value)
        if array.dtype.kind in "fiub" and array.dtype.isnative and array.dtype.itemsize <= 8:
            return torch.from_numpy(array)
        value = array.tolist()
    if not isinstance(value, (list, tuple)):
        raise ProxpoError(f"{name} is {kind(value)}, expected a list")
    if _any(value, Tensor):
        return _stacked(value, name)
    if name in MAY_BE_TEXT and _any(value, str):
        words: list[str] = []
        value = _numbered(value, words, {})
        if text is not None:
            text[name] = words
    numbers, shape = _flatten(value, name)
    whole = name in INTEGERS and all(isinstance(number, int) for number in numbers)
    dtype = torch.int64 if whole else torch.float64
    try:
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    except (OverflowError, RuntimeError, ValueError):
        label = "int64" if whole else "float64"
        raise ProxpoError(f"{name} holds an integer too large for {label}") from None


def _stacked(value: Any, place: str) -> Tensor:
    """A list of tensors as one, with its gradient."""
    rows = []
    for i, row in enumerate(value):
        rows.append(row if isinstance(row, Tensor) else _entry(row, f"{place}[{i}]"))
        if rows[i].shape != rows[0].shape:
            raise _ragged(place, i, tuple(rows[i].shape), tuple(rows[0].shape))
    return torch.stack(rows)


def _entry(value: Any, place: str) -> Tensor:
    if isinstance(value, (list, tuple)) and _any(value, Tensor):
        return _stacked(value, place)
    if isinstance(value, (list, tuple)):
        numbers, shape = _flatten(value, place)
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape)
    return torch.tensor(_flatten([value], place)[0][0])


def _flatten(value: Any, place: str) -> tuple[list[int | float], tuple[int, ...]]:
    """Numbers in order and the shape; ragged or foreign content is named by its place."""
    if not any(isinstance(entry, (list, tuple)) for entry in value):
        if not set(map(type, value)) <= {int, float, bool, type(None)}:
            value = [_number(entry, f"{place}[{i}]") for i, entry in enumerate(value)]
        return [math.nan if entry is None else entry for entry in value], (len(value),)
    numbers: list[int | float] = []
    first: tuple[int, ...] | None = None
    for i, row in enumerate(value):
        if not isinstance(row, (list, tuple)):
            raise ProxpoError(f"{place}[{i}] is {kind(row)}, expected a list like its neighbours")
        part, shape = _flatten(row, f"{place}[{i}]")
        first = shape if first is None else first
        if shape != first:
            raise _ragged(place, i, shape, first)
        numbers += part
    return numbers, (len(value), *(first or ()))


def _number(value: Any, place: str) -> int | float | None:
    """A number of Python or numpy."""
    plain = value.item() if hasattr(value, "__array__") and hasattr(value, "item") else value
    if plain is None or isinstance(plain, (int, float)):
        return plain
    raise ProxpoError(f"{place} is {kind(plain)}, expected a number")


def _ragged(place: str, row: int, given: tuple[int, ...], first: tuple[int, ...]) -> ProxpoError:
    return ProxpoError(
        f"{place} is ragged: row {row} has {_count(given)}, row 0 has {_count(first)}; "
        "pad the rows and set mask to 0 there"
    )


def _any(value: Any, sort: type) -> bool:
    """Some entry of nested lists is of this type."""
    return any(
        isinstance(entry, sort) or (isinstance(entry, (list, tuple)) and _any(entry, sort))
        for entry in value
    )


def _numbered(value: Any, words: list[str], seen: dict[str, int]) -> list[Any]:
    """Each distinct entry's number, by first appearance, collected in `words`; null stays."""
    out: list[Any] = []
    for entry in value:
        if isinstance(entry, (list, tuple)):
            out.append(_numbered(entry, words, seen))
        elif entry is None or isinstance(entry, dict):
            out.append(entry)
        else:
            if str(entry) not in seen:
                seen[str(entry)] = len(words)
                words.append(str(entry))
            out.append(seen[str(entry)])
    return out


def check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """An error unless the field goes with log-probabilities of this shape."""
    given = tuple(value.shape)
    if name in PER_RESPONSE:
        allowed: tuple[tuple[int, ...], ...] = (shape[:1],)
    elif name in THREE_AXES:
        allowed = ((*shape, *given[2:3]),) if len(given) == 3 else ()
    elif name in ROWS:
        allowed = ((*shape[:1], *given[1:2]),) if len(given) == 2 else ()
    else:
        allowed = (shape, shape[:1]) if name == "advantages" else (shape,)
    if given not in allowed:
        expected = " or ".join(map(shown, allowed))
        if name in THREE_AXES:
            expected = f"{shown(shape)} x {THREE_AXES[name]}"
        elif name in ROWS:
            expected = f"{shown(shape[:1])} x units"
        raise ProxpoError(f"{name} is {shown(given)}, expected {expected} to go with logp")


def typed(name: str, value: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The field in its dtype; `dtype` is for numbers that have none of the floating ones."""
    if value.dtype in DTYPES.get(name, FLOATS):
        return value
    if name in BOOLS:
        return boolean(name, value, valid(name, value, mask))
    if name in INTEGERS:
        return _integer(name, value, valid(name, value, mask))
    return floating(value, dtype)


def floating(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype in FLOATS else value.to(dtype)


def boolean(name: str, value: Tensor, valid: Tensor) -> Tensor:
    """True where the field is 1; anything but 0 and 1 is refused where the field counts."""
    if value.dtype == torch.bool:
        return value
    refuse(name, value, valid & (value != 0) & (value != 1), "0 or 1")
    return (value == 1) & valid


def _integer(name: str, value: Tensor, valid: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.long()
    value = value.double()
    whole = value.isfinite() & (value == value.round()) & (value.abs() < 2**53)
    refuse(name, value, valid & ~whole, "an integer")
    return torch.where(whole, value, 0.0).long()


def check_rollout(present: Sequence[tuple[str, Tensor]], mask: Tensor) -> None:
    """An error for the first number that no loss could use: infinite, NaN, or a vast reward.

    Clamps and comparisons inside a loss would hide it. The fields are zero at masked tokens; empty
    responses need a usable reward alone. One look at the device tells that all is well. Durations
    are judged where they are used.
    """
    filled = mask.any(dim=1)
    judged = [(name, x) for name, x in present if name != "duration" and x.numel()]
    floats = [(name, x.detach()) for name, x in judged if x.is_floating_point()]
    signs = [
        # The vocabulary is too wide for a table of what is wrong, until something is.
        ~x.max().isfinite() if name in PER_VOCABULARY else _unusable(name, x, filled).any()
        for name, x in floats
    ]
    if not signs or not bool(torch.stack(signs).any()):
        return
    for name, x in floats:
        expected = f"a number whose square fits {str(x.dtype).removeprefix('torch.')}"
        refuse(
            name, x, _unusable(name, x, filled), expected if name in REWARDS else "a finite number"
        )


def _unusable(name: str, value: Tensor, filled: Tensor) -> Tensor:
    rows = filled.reshape(filled.shape + (1,) * (value.dim() - 1))
    if name in REWARDS:  # of empty responses too, which have a place in their group
        vast = value.abs() > math.sqrt(torch.finfo(value.dtype).max / len(filled))
        return vast | value.isnan() if name == "token_rewards" else vast
    if name in PER_VOCABULARY:  # -∞ is the log-probability of an impossible token
        return ~(value < torch.inf) & rows
    return ~value.isfinite() & rows


def check_finite(name: str, value: Tensor, mask: Tensor) -> None:
    """An error where the field counts and holds no finite number."""
    if value.is_floating_point():
        missing = name in MAY_BE_MISSING
        refused = value.isinf() if missing else ~value.isfinite() & valid(name, value, mask)
        refuse(name, value, refused, "a finite number")


def valid(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """Where the field counts: at valid tokens, in responses that have one."""
    if name in PER_RESPONSE or name in ROWS:
        return torch.ones_like(value, dtype=torch.bool)
    if value.dim() == 1:
        return mask.any(dim=1)
    return mask.reshape(mask.shape + (1,) * (value.dim() - 2)).expand_as(value)


def refuse(name: str, value: Tensor, refused: Tensor, expected: str) -> None:
    """An error that names the first refused entry, if there is one."""
    if refused.any():
        place = refused.nonzero()[0].tolist()
        where = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "column", "entry"), place))
        entry = float(value.detach()[tuple(place)])
        text = "null or NaN" if math.isnan(entry) else f"{entry:g}"
        raise ProxpoError(f"{name} at {where} (counted from 0) is {text}, expected {expected}")


def shown(shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f"a list of {shape[0]}" if shape else "a single number"
    return " x ".join(map(str, shape))


def _count(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} value{'' if shape[0] == 1 else 's'}" if len(shape) == 1 else shown(shape)


def kind(value: Any) -> str:
    """The sort of a value that is no list of numbers, in words."""
    if isinstance(value, (int, float)):
        return f"the number {value}"
    names = {dict: "an object", list: "a list", tuple: "a list", str: "text", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


__all__ = [
    "PER_RESPONSE",
    "ROWS",
    "THREE_AXES",
    "as_tensor",
    "boolean",
    "check_finite",
    "check_rollout",
    "check_shape",
    "fit",
    "fitted",
    "shown",
    "typed",
]
