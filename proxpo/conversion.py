"""Conversion of a user's lists, arrays and tensors to batch fields of the right shape and dtype.

`Batch` and the batch files share this code: the same mistake gets the same line. What has one
meaning is converted: lists, numpy arrays, whole numbers as 0/1 masks or rewards, floats that are
whole numbers as group numbers. Everything else is refused with its name and place. Tensors that
fit are left alone and their values are not looked at.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from proxpo.errors import ProxpoError
from proxpo.fields import FIELDS, FLOATS, REQUIRED, Field, find_field
from proxpo.ops.shapes import Tensor

WORDS = {"vocab": "vocabulary", "dim": "units", "latent": "units"}  # axes in error messages


def fits(values: Mapping[str, Any]) -> bool:
    """True if all fields are tensors of their dtypes and shapes on one device; reads no value."""
    logp = values.get("logp")
    if not isinstance(logp, Tensor) or logp.dim() != 2 or "mask" not in values:
        return False
    shape, device = logp.shape, logp.device
    rows, sizes = shape[:1], dict[str, int]()
    for name, value in values.items():
        field = FIELDS.get(name)
        if field is None or not isinstance(value, Tensor) or value.device != device:
            return False
        if value.dtype not in field.dtypes:
            return False
        size = value.shape
        if field.last:
            known = size[:-1] == (shape if field.per_token else rows)
            if not known or sizes.setdefault(field.last, size[-1]) != size[-1]:
                return False
        elif field.per_response:
            if size != rows:
                return False
        elif size != shape and (size != rows or field.axes != "seq [tok]"):
            return False
    return True


def fitted(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields as tensors that fit; those that fit already are left untouched.

    Python's numbers and integers get the floating dtype of `logp`, which as a list has float64.
    """
    declared = {name: find_field(name) for name in values}
    for name in REQUIRED:
        if name not in values:
            raise ProxpoError(f"the field '{name}' is missing; every batch needs logp and mask")
    logp = floating(as_tensor("logp", values["logp"]), torch.float64)
    shape = tuple(logp.shape)
    if len(shape) != 2:
        raise ProxpoError(f"logp is {shown(shape)}, expected responses x tokens")
    dtype = torch.promote_types(logp.dtype, torch.float32)
    tensors = {"logp": logp}
    for name, value in values.items():
        if name == "logp":
            continue
        tensor = as_tensor(name, value).to(logp.device)
        check_shape(declared[name], tensor, shape)
        plain = isinstance(value, (list, tuple)) and declared[name].kind in ("float", "number")
        tensors[name] = tensor.to(dtype) if plain else tensor
    _check_last_axes(tensors)
    mask = boolean("mask", tensors["mask"], torch.ones_like(logp, dtype=torch.bool))
    return {name: typed(declared[name], x, mask, dtype) for name, x in tensors.items()}


def _check_last_axes(tensors: Mapping[str, Tensor]) -> None:
    """Refuses fields that disagree in the size of an axis they share."""
    first: dict[str, str] = {}
    for name, field in FIELDS.items():
        if name in tensors and field.last:
            other = first.setdefault(field.last, name)
            size, shape = tensors[other].shape[-1], tuple(tensors[name].shape)
            if shape[-1] != size:
                raise ProxpoError(
                    f"{name} is {shown(shape)}, but the last axis of {other} is {size}"
                )


def as_tensor(name: str, value: Any, text: dict[str, list[str]] | None = None) -> Tensor:
    """The value as a tensor of numbers, NaN for null; words of `text` fields get numbers."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ProxpoError(f"{name} holds complex numbers, expected real ones")
        return _numeric(name, value)
    if hasattr(value, "__array__"):
        import numpy

        array = numpy.array(value)
        if array.dtype.kind in "fiub" and array.dtype.isnative and array.dtype.itemsize <= 8:
            return _numeric(name, torch.from_numpy(array))
        value = array.tolist()
    if not isinstance(value, (list, tuple)):
        raise ProxpoError(f"{name} is {kind(value)}, expected a list")
    if _any(value, Tensor):
        return _stacked(value, name)
    if FIELDS[name].text and _any(value, str):
        words: list[str] = []
        value = _numbered(value, words, {})
        if text is not None:
            text[name] = words
    numbers, shape = _flatten(value, name)
    if numbers and all(isinstance(number, bool) for number in numbers):
        _numeric(name, torch.tensor(numbers))
    whole = FIELDS[name].kind == "int" and all(isinstance(number, int) for number in numbers)
    dtype = torch.int64 if whole else torch.float64
    try:
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    except (OverflowError, RuntimeError, ValueError):
        label = "int64" if whole else "float64"
        raise ProxpoError(f"{name} holds an integer too large for {label}") from None


def _numeric(name: str, value: Tensor) -> Tensor:
    """Refuses truth values as numbers: a mask in the wrong place. As rewards they are 0 and 1."""
    field = FIELDS[name]
    if value.dtype == torch.bool and field.kind in ("float", "number") and not field.squared:
        raise ProxpoError(f"{name} holds true and false, expected numbers")
    return value


def _stacked(value: Any, place: str) -> Tensor:
    """A list of tensors as one tensor, differentiable."""
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
    """Numbers in order, and their shape; refuses ragged or foreign content by its place."""
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
    """The value as a Python number, or None; refuses anything else."""
    plain = value.item() if hasattr(value, "__array__") and hasattr(value, "item") else value
    if plain is None or isinstance(plain, (int, float)):
        return plain
    raise ProxpoError(f"{place} is {kind(plain)}, expected a number")


def _ragged(place: str, row: int, shape: tuple[int, ...], first: tuple[int, ...]) -> ProxpoError:
    return ProxpoError(
        f"{place} is ragged: row {row} has {_count(shape)}, row 0 has {_count(first)}; "
        "pad the rows and set mask to 0 there"
    )


def _any(value: Any, sort: type) -> bool:
    """True if an entry of the nested lists is of this type."""
    return any(
        isinstance(entry, sort) or (isinstance(entry, (list, tuple)) and _any(entry, sort))
        for entry in value
    )


def _numbered(value: Any, words: list[str], numbers: dict[str, int]) -> list[Any]:
    """The entries numbered by first appearance and collected in `words`; null stays."""
    out: list[Any] = []
    for entry in value:
        if isinstance(entry, (list, tuple)):
            out.append(_numbered(entry, words, numbers))
        elif entry is None or isinstance(entry, dict):
            out.append(entry)
        else:
            if str(entry) not in numbers:
                numbers[str(entry)] = len(words)
                words.append(str(entry))
            out.append(numbers[str(entry)])
    return out


def check_shape(field: Field, value: Tensor, shape: tuple[int, ...]) -> None:
    """Refuses a value whose shape does not go with log-probabilities of this shape."""
    size, outer = tuple(value.shape), shape if field.per_token else shape[:1]
    if field.last:
        fitting = size[:-1] == outer
        expected = f"{shown(outer)} x {WORDS.get(field.last, field.last)}"
    else:
        allowed = (outer, shape[:1]) if field.axes == "seq [tok]" else (outer,)
        fitting, expected = size in allowed, " or ".join(map(shown, allowed))
    if not fitting:
        raise ProxpoError(f"{field.name} is {shown(size)}, expected {expected} to go with logp")


def typed(field: Field, value: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in the field's dtype; `dtype` is for a float field of whole numbers."""
    if value.dtype in field.dtypes:
        return value
    if field.kind == "bool":
        return boolean(field.name, value, valid(field, value, mask))
    if field.kind == "int":
        return _integer(field.name, value, valid(field, value, mask))
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
    """Refuses the first number that no loss could use: infinite, NaN, or a vast reward.

    Clamps and comparisons inside a loss would hide it. The fields are zero at masked tokens; empty
    responses need a usable reward alone. A single transfer from the device tells that all is well.
    """
    filled = mask.any(dim=1)
    floats = [
        (FIELDS[name], x.detach())
        for name, x in present
        if FIELDS[name].checked and x.numel() and x.is_floating_point()
    ]
    signs = [
        # The vocabulary is too wide for a table of what is wrong, until something is.
        ~x.max().isfinite() if field.last == "vocab" else _unusable(field, x, filled).any()
        for field, x in floats
    ]
    if not signs or not bool(torch.stack(signs).any()):
        return
    for field, x in floats:
        square = f"a number whose square fits {str(x.dtype).removeprefix('torch.')}"
        expected = square if field.squared else "a finite number"
        refuse(field.name, x, _unusable(field, x, filled), expected)


def _unusable(field: Field, value: Tensor, filled: Tensor) -> Tensor:
    rows = filled.reshape(filled.shape + (1,) * (value.dim() - 1))
    if field.squared:  # of empty responses too, which have a place in their group
        vast = value.abs() > math.sqrt(torch.finfo(value.dtype).max / len(filled))
        return vast | value.isnan() if field.per_token else vast
    if field.last == "vocab":  # -∞, the log-probability of an impossible token, is a number too
        return ~(value < torch.inf) & rows
    return ~value.isfinite() & rows


def check_finite(field: Field, value: Tensor, mask: Tensor) -> None:
    """Refuses a value that is not finite where the field counts."""
    if value.is_floating_point():
        finite = value < torch.inf if field.last == "vocab" else value.isfinite()
        bad = value.isinf() if field.missing else ~finite & valid(field, value, mask)
        refuse(field.name, value, bad, "a finite number")


def valid(field: Field, value: Tensor, mask: Tensor) -> Tensor:
    """True where the field counts: at valid tokens, in responses that have one."""
    if not field.per_token:
        return torch.ones_like(value, dtype=torch.bool)
    if value.dim() == 1:
        return mask.any(dim=1)
    return mask.reshape(mask.shape + (1,) * (value.dim() - 2)).expand_as(value)


def refuse(name: str, value: Tensor, refused: Tensor, expected: str) -> None:
    """Raises an error that names the first refused entry, if there is one."""
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
    """Words for a value that is no list of numbers."""
    if isinstance(value, (int, float)):
        return f"the number {value}"
    names = {dict: "an object", list: "a list", tuple: "a list", str: "text", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


__all__ = ["as_tensor", "check_finite", "check_rollout", "fits", "fitted"]
