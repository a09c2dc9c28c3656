"""Batch files: the fields of a Batch by name, in `.json` (nested lists) or `.safetensors`.

    {"logp": [[-0.1, -2.3], [-0.7, null]], "mask": [[1, 1], [1, 0]], "rewards": [1, 0], ...}

Everything is read as float64. What is written where `mask` is 0 does not matter, null and NaN
included; at a valid position both are refused. A null in `rewards` is a missing reward. In JSON,
`group` and `tokens` may be text; both then get numbers in the order of first appearance.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from proxpo.errors import ProxpoError, nearest
from proxpo.files import write_whole
from proxpo.shapes import Tensor
from proxpo.types import ROWS, Batch

MAX_JSON_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
SAMPLE = Path(__file__).parent / "data" / "sample_batch.json"

BOOLS = ("mask", "step_end", "correct", "truncated", "void", "refresh", "gate")
INTEGERS = ("tokens", "turn", "group", "prompt_id", "pair")
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
MAY_BE_TEXT = ("group", "tokens")


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A batch as it was written: `text` keeps the words of fields that had words for numbers."""

    batch: Batch
    text: dict[str, list[str]]


def load_batch(path: str | Path) -> Batch:
    """The batch in a `.json` or `.safetensors` file; "sample" is the one proxpo ships."""
    return read_batch(path).batch


def read_batch(path: str | Path) -> BatchFile:
    """`load_batch`, with the words behind the numbers."""
    path = SAMPLE if str(path) == "sample" else Path(path)
    readers: dict[str, Callable[[Path], dict[str, Any]]] = {
        ".json": _read_json,
        ".safetensors": _read_safetensors,
    }
    if path.is_dir():
        raise ProxpoError(f"batch {path}: is a directory, expected a .json or .safetensors file")
    if path.suffix.lower() not in readers:
        raise ProxpoError(f"batch {path}: expected a .json or .safetensors file, or 'sample'")
    try:
        found = readers[path.suffix.lower()](path)
        text: dict[str, list[str]] = {}
        return BatchFile(batch=_checked(found, text), text=text)
    except ProxpoError as error:
        raise ProxpoError(f"batch {path}: {error}") from None


def save_batch(batch: Batch, path: str | Path) -> None:
    """Write the fields that are there; `load_batch` gives them back. NaN is null in JSON."""
    path = Path(path)
    tensors = {name: value.detach().cpu().contiguous() for name, value in batch.items()}
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import save

        write_whole(path, save(tensors))
    elif path.suffix.lower() == ".json":
        lists = {name: _without_nan(_plain(value)) for name, value in tensors.items()}
        write_whole(path, json.dumps(lists, allow_nan=False).encode())
    else:
        raise ProxpoError(f"batch {path}: can be saved as .json or .safetensors")


def _plain(value: Tensor) -> Any:
    return (value.int() if value.dtype == torch.bool else value).tolist()


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_json(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ProxpoError(
            f"{size / 2**20:.0f} MiB of JSON, the limit is {MAX_JSON_BYTES // 2**20} MiB; "
            "write large batches as .safetensors"
        )
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start.startswith(b"{"):
            raise ProxpoError("not a batch: expected a JSON object that starts with '{'")
        file.seek(0)
        data = file.read()
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except ProxpoError:
        raise
    except RecursionError:
        raise ProxpoError("not a batch: lists nested too deeply") from None
    except ValueError as error:  # bad JSON, bad UTF-8, integers of thousands of digits
        raise ProxpoError(f"not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ProxpoError(f"the field '{name}' is given twice")
        found[name] = value
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or header > min(size - 8, MAX_HEADER_BYTES):
        raise ProxpoError("not a safetensors file: its header is not one")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ProxpoError(f"not a safetensors file: {error}") from None


def _checked(found: dict[str, Any], text: dict[str, list[str]]) -> Batch:
    known = [field.name for field in fields(Batch)]
    for name in found:
        if name not in known:
            raise ProxpoError(f"unknown field '{name}'{nearest(name, known)}")
    present = {name: value for name, value in found.items() if value is not None}
    for name in ("logp", "mask"):
        if name not in present:
            raise ProxpoError(f"the field '{name}' is missing; every batch needs logp and mask")
    tensors = {name: _tensor(name, value, text) for name, value in present.items()}
    shape = tuple(tensors["logp"].shape)
    if 0 in shape:
        raise ProxpoError("the batch is empty: logp holds no tokens")
    if len(shape) != 2:
        raise ProxpoError(f"logp is {_shape(shape)}, expected responses x tokens")
    for name, value in tensors.items():
        _check_shape(name, value, shape)
    mask = _boolean("mask", tensors["mask"], torch.ones_like(tensors["mask"], dtype=torch.bool))
    return Batch(**{name: _typed(name, value, mask) for name, value in tensors.items()})


def _tensor(name: str, value: Any, text: dict[str, list[str]]) -> Tensor:
    """The field as float64 (words and integers of INTEGERS as int64), NaN for null."""
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ProxpoError(f"{name} holds complex numbers, expected real ones")
        return value.to(torch.float64)
    if not isinstance(value, list):
        raise ProxpoError(f"{name} is {_kind(value)}, expected a list")
    if name in MAY_BE_TEXT and _any_text(value):
        value = _numbered(value, text.setdefault(name, []), {})
    numbers, shape = _flatten(value, name)
    try:
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape)
    except OverflowError:
        raise ProxpoError(f"{name} holds an integer too large for float64") from None


def _flatten(value: list[Any], place: str) -> tuple[list[int | float], tuple[int, ...]]:
    """Numbers in order and the shape; ragged or foreign content is named by its place."""
    if not any(isinstance(one, list) for one in value):
        if not set(map(type, value)) <= {int, float, bool, type(None)}:
            at, odd = next((i, v) for i, v in enumerate(value) if isinstance(v, (str, dict)))
            raise ProxpoError(f"{place}[{at}] is {_kind(odd)}, expected a number")
        return [math.nan if one is None else one for one in value], (len(value),)
    numbers: list[int | float] = []
    first: tuple[int, ...] | None = None
    for i, row in enumerate(value):
        if not isinstance(row, list):
            raise ProxpoError(f"{place}[{i}] is {_kind(row)}, expected a list like its neighbours")
        part, shape = _flatten(row, f"{place}[{i}]")
        first = shape if first is None else first
        if shape != first:
            raise ProxpoError(
                f"{place} is ragged: row {i} has {_count(shape)}, row 0 has {_count(first)}; "
                "pad the rows and set mask to 0 there"
            )
        numbers += part
    return numbers, (len(value), *(first or ()))


def _any_text(value: list[Any]) -> bool:
    return any(isinstance(v, str) or (isinstance(v, list) and _any_text(v)) for v in value)


def _numbered(value: list[Any], words: list[str], seen: dict[str, int]) -> list[Any]:
    """Each distinct entry's number, by first appearance, collected in `words`; null stays."""
    out: list[Any] = []
    for one in value:
        if isinstance(one, list):
            out.append(_numbered(one, words, seen))
        elif one is None or isinstance(one, dict):
            out.append(one)
        else:
            if str(one) not in seen:
                seen[str(one)] = len(words)
                words.append(str(one))
            out.append(seen[str(one)])
    return out


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
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
        expected = " or ".join(map(_shape, allowed))
        if name in THREE_AXES:
            expected = f"{_shape(shape)} x {THREE_AXES[name]}"
        elif name in ROWS:
            expected = f"{_shape(shape[:1])} x units"
        raise ProxpoError(f"{name} is {_shape(given)}, expected {expected} to go with logp")


def _typed(name: str, value: Tensor, mask: Tensor) -> Tensor:
    valid = _valid(value, mask, name)
    if name in BOOLS:
        return _boolean(name, value, valid)
    if name in INTEGERS:
        return _integer(name, value, valid)
    refused = value.isinf() if name == "rewards" else ~value.isfinite() & valid
    _refuse(name, value, refused, "a finite number")
    return value


def _valid(value: Tensor, mask: Tensor, name: str) -> Tensor:
    """Where the field counts: at valid tokens, in responses that have one."""
    if name in PER_RESPONSE or name in ROWS:
        return torch.ones_like(value, dtype=torch.bool)
    if value.dim() == 1:
        return mask.any(dim=1)
    return mask.reshape(mask.shape + (1,) * (value.dim() - 2)).expand_as(value)


def _boolean(name: str, value: Tensor, valid: Tensor) -> Tensor:
    _refuse(name, value, valid & (value != 0) & (value != 1), "0 or 1")
    return (value == 1) & valid


def _integer(name: str, value: Tensor, valid: Tensor) -> Tensor:
    whole = value.isfinite() & (value == value.round()) & (value.abs() < 2**53)
    _refuse(name, value, valid & ~whole, "an integer")
    return torch.where(whole, value, 0.0).long()


def _refuse(name: str, value: Tensor, refused: Tensor, expected: str) -> None:
    if refused.any():
        place = refused.nonzero()[0].tolist()
        where = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "column", "entry"), place))
        found = float(value[tuple(place)])
        shown = "null or NaN" if math.isnan(found) else f"{found:g}"
        raise ProxpoError(f"{name} at {where} (counted from 0) is {shown}, expected {expected}")


def _shape(shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return f"a list of {shape[0]}" if shape else "a single number"
    return " x ".join(map(str, shape))


def _count(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} value{'' if shape[0] == 1 else 's'}" if len(shape) == 1 else _shape(shape)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return names.get(type(value), f"the number {value}")


__all__ = ["SAMPLE", "BatchFile", "load_batch", "read_batch", "save_batch"]
