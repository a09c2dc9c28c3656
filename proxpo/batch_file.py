"""Batch files: the fields of a Batch by name, in `.json` (nested lists) or `.safetensors`.

    {"logp": [[-0.1, -2.3], [-0.7, null]], "mask": [[1, 1], [1, 0]], "rewards": [1, 0], ...}

Everything is read as float64. What is written where `mask` is 0 does not matter, null and NaN
included; at a valid position both are refused. A null in `rewards` is a missing reward. In JSON,
`group` and `tokens` may be text; both then get numbers in the order of first appearance.

A run saves the batch of a step as `batches/step-N.safetensors` in its folder (`BatchRecorder`);
`proxpo inspect METHOD --run FOLDER --step N` reads it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proxpo.conversion import as_tensor, check_finite
from proxpo.errors import ProxpoError
from proxpo.fields import FIELDS, find_field
from proxpo.ops.shapes import Int, Tensor
from proxpo.runs.files import write_whole
from proxpo.types import Batch

MAX_JSON_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
MAX_FIELD_BYTES = 2**30
BATCHES = "batches"
SAMPLE = Path(__file__).parent / "data" / "sample_batch.json"


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A batch and, in `text`, the words of fields that had words for numbers."""

    batch: Batch
    text: dict[str, list[str]]


def load_batch(path: str | Path) -> Batch:
    """The batch in a `.json` or `.safetensors` file; "sample" is the one proxpo ships."""
    return read_batch(path).batch


def read_batch(path: str | Path) -> BatchFile:
    """The batch in a file, and the words that stand behind its numbers."""
    path = SAMPLE if str(path) == "sample" else Path(path)
    readers: dict[str, Callable[[Path], dict[str, Any]]] = {
        ".json": _read_json,
        ".safetensors": _read_safetensors,
    }
    if path.is_dir():
        raise ProxpoError(f"batch {path}: is a directory, expected a .json or .safetensors file")
    if path.suffix.lower() not in readers:
        raise ProxpoError(
            f"batch {path}: expected a .json or .safetensors file, or 'sample'; from Python "
            "proxpo.save_batch(proxpo.Batch(...), FILE) writes one"
        )
    try:
        fields = readers[path.suffix.lower()](path)
        text: dict[str, list[str]] = {}
        return BatchFile(batch=_batch(fields, text), text=text)
    except ProxpoError as error:
        raise ProxpoError(f"batch {path}: {error}") from None


def save_batch(batch: Batch, path: str | Path) -> None:
    """Writes the fields that are present, for `load_batch`; NaN is null in JSON."""
    path = Path(path)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in batch.items()}
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import save

        write_whole(path, save(tensors))
    elif path.suffix.lower() == ".json":
        _refuse_infinite(batch)
        lists = {name: _without_nan(_plain(value)) for name, value in tensors.items()}
        write_whole(path, json.dumps(lists, allow_nan=False).encode())
    else:
        raise ProxpoError(f"batch {path}: can be saved as .json or .safetensors")


def _refuse_infinite(batch: Batch) -> None:
    """Refuses impossible tokens of the vocabulary, which `load_batch` would read as NaN."""
    for name, value in batch.items():
        if FIELDS[name].last == "vocab" and (value.isneginf() & batch.mask[..., None]).any():
            raise ProxpoError(f"{name} holds -∞, which JSON cannot: save it as .safetensors")


class BatchRecorder:
    """The batch of one rollout while it is trained on, before any stage of the recipe.

    A response has the numbers of the policy that the loss saw in its last update. `fields` are
    those known before the first update, for all responses.
    """

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._fields = {name: value.detach() for name, value in fields.items()}
        self._unseen: dict[str, Tensor] = {}  # by field: rows without a value

    def see(self, rows: Int[Tensor, " row"], fields: Mapping[str, Tensor]) -> None:
        """Takes the fields that a forward pass brought for these rows, before its update."""
        mask = self._fields["mask"]
        for name, value in fields.items():
            if name not in self._fields:
                shape = (*mask.shape, *value.shape[2:])
                self._fields[name] = value.new_zeros(shape)
                self._unseen[name] = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
            whole = self._fields[name].clone()
            whole[rows, : value.shape[1]] = value.detach().to(whole)
            self._fields[name] = whole
            if name in self._unseen:
                self._unseen[name][rows] = False

    def fields(self) -> dict[str, Tensor]:
        """The fields that all rows have."""
        seen = {name for name in self._fields if not self._is_partial(name)}
        return {name: value for name, value in self._fields.items() if name in seen}

    def _is_partial(self, name: str) -> bool:
        return name in self._unseen and bool(self._unseen[name].any())


def save_step(
    folder: str | Path,
    step: int,
    fields: Mapping[str, Tensor],
    *,
    on_notice: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes the batch of a step below the folder of its run; leaves out fields over 1 GiB."""
    path = Path(folder) / BATCHES / f"step-{step}.safetensors"
    large = [n for n, x in fields.items() if x.numel() * x.element_size() > MAX_FIELD_BYTES]
    if large:
        on_notice(f"{path} is without {', '.join(large)}: over 1 GiB each")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_batch(Batch(**{n: x for n, x in fields.items() if n not in large}), path)


def saved_steps(folder: str | Path) -> dict[int, Path]:
    """The batches that a run has saved, by step."""
    names = re.compile(r"step-(\d+)\.safetensors")
    files = sorted((Path(folder) / BATCHES).glob("step-*.safetensors"))
    matches = ((names.fullmatch(path.name), path) for path in files)
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def step_file(folder: str | Path, step: int) -> Path:
    """The batch that a run saved for a step, or an error that says which steps there are."""
    steps = saved_steps(folder)
    if not Path(folder).is_dir():
        raise ProxpoError(f"run {folder}: no such folder")
    if not steps:
        raise ProxpoError(
            f"run {folder}: it has saved no batch; --set log.batch_every=N saves one every N steps "
            "(in TRL ProxpoTrainer(batch_every=N), in verl policy_loss.batch_every)"
        )
    if step not in steps:
        raise ProxpoError(
            f"run {folder}: no batch of step {step}; there are those of {_listed(list(steps))}"
        )
    return steps[step]


def _listed(steps: list[int]) -> str:
    """Some steps of a long list."""
    few = steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]
    return ", ".join(map(str, few))


def _plain(value: Tensor) -> Any:
    return (value.int() if value.dtype == torch.bool else value).tolist()


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
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
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ProxpoError(f"the field '{name}' is given twice")
        fields[name] = value
    return fields


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


def _batch(fields: dict[str, Any], text: dict[str, list[str]]) -> Batch:
    for name in fields:
        find_field(name)  # refuses an unknown name
    tensors = {
        name: as_tensor(name, value, text) for name, value in fields.items() if value is not None
    }
    if 0 in tensors.get("logp", torch.ones(1)).shape:
        raise ProxpoError("the batch is empty: logp holds no tokens")
    wide: dict[str, Any] = {name: _wide(value) for name, value in tensors.items()}
    batch = Batch(**wide)
    for name, value in batch.items():
        check_finite(FIELDS[name], value, batch.mask)
    return batch


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float64) if value.is_floating_point() else value


__all__ = [
    "SAMPLE",
    "BatchFile",
    "BatchRecorder",
    "load_batch",
    "read_batch",
    "save_batch",
    "save_step",
    "saved_steps",
    "step_file",
]
