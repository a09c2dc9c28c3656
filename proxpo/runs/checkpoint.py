"""Checkpoints that survive a kill at any moment: safetensors + JSON, hashed, put in place whole.

    step-40/manifest.json      sha256 and size of every other file
            info.json          step, counters, whatever JSON the trainer hands in
            model/             weights as transformers loads them, when asked for
            <part>.safetensors its tensors; large parts go on in <part>.2.safetensors, ...
            <part>.json        the structure around them, and the tensors that model/ holds

A tensor that a file of model/ holds bit for bit is not written a second time. A directory called
step-N is complete by construction: it is written under another name, flushed to the disk, then
renamed. Older ones go only after that.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor
from proxpo.runs.trees import flatten, unflatten

FORMAT = 2
READ = (1, FORMAT)  # in form 1 model/ held the weights a second time
LARGEST = 1 << 30  # bytes of a file of tensors, unless a single one is larger
WEIGHTS = "weights"  # the part that model/ may hold
Job = Callable[[], Any]
Index = dict[tuple, list[tuple[str, str]]]  # (file, name) of tensors that may be equal
THREADS = 4  # files that are written, or hashed, at a time
MANIFEST = "manifest.json"
# A step saved again moves the earlier directory aside for a moment; it counts if a kill falls there
NAME = re.compile(r"step-(\d+)(\.previous)?")
FURTHER = re.compile(r"[A-Za-z0-9_-]+\.[0-9]+\.safetensors")  # the second file of a part, ...
UNFINISHED = ".unfinished-"
# Errors of reading a damaged file; RecursionError: JSON nested deeper than Python reads.
DAMAGE = (
    OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `skipped`: later ones that are damaged, each with the damage."""

    path: Path
    step: int
    parts: dict[str, Any]
    info: dict[str, Any]
    model: Path | None = None
    skipped: tuple[str, ...] = ()


def save_checkpoint(
    root: Path,
    step: int,
    parts: Mapping[str, Any],
    info: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    *,
    keep_last: int = 2,
    write_model: Callable[[Path], None] | None = None,
) -> Path:
    """Writes root/step-N, deletes all but the last `keep_last`, and returns the new one.

    A part is any nesting of dicts, lists, numbers and tensors, such as a state dict. A function
    `info` is called when the tensors are written.
    """
    if keep_last < 1:
        raise ProxpoError(f"checkpoint.keep is at least 1, got {keep_last}")
    root = Path(root)
    final, working = root / f"step-{step}", root / f"{UNFINISHED}{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(f"{UNFINISHED}*"):
            shutil.rmtree(stale)
        working.mkdir()
        _write(working, step, parts, info, write_model)
        _move_into_place(working, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(working, ignore_errors=True)
        raise ProxpoError(f"checkpoint {final} could not be written: {_reason(error)}") from error
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    # A later step was damaged, or the run would have gone on from there: it does not count.
    later = [path for path in checkpoints(root) if step_of(path) > step]
    for path in (*later, *checkpoints(root)[: -keep_last - len(later)]):
        _discard(path)
    return final


def load_latest(root: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all as written; None where there never was one.

    Damaged ones are passed over and named in `skipped`; when none is whole, that is an error.
    """
    skipped: list[str] = []
    for path in reversed(checkpoints(root)):
        try:
            verify(path)
            return replace(read_checkpoint(path), skipped=tuple(skipped))
        except DAMAGE as error:
            skipped.append(f"{path.name}: {_reason(error)}")
    if skipped:
        raise ProxpoError(f"no usable checkpoint in {root}: {'; '.join(skipped)}")
    return None


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint directories, oldest first."""
    named = [(NAME.fullmatch(path.name), path) for path in Path(root).glob("step-*")]
    steps = [(int(m[1]), m[2] is None, path) for m, path in named if m and path.is_dir()]
    return [path for *_, path in sorted(steps)]


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint directory."""
    name = NAME.fullmatch(path.name)
    assert name is not None, path
    return int(name[1])


def verify(path: Path) -> None:
    """Raises unless every file is there with the size and hash it was written with."""
    listed = _manifest(path)["files"].items()
    for name, (size, _) in listed:
        file = path / name
        if not file.is_file():
            raise ProxpoError(f"{name} is missing")
        if file.stat().st_size != size:
            raise ProxpoError(f"{name} has {file.stat().st_size} bytes, {size} were written")
    side_by_side(partial(_check_hash, path / name, name, digest) for name, (_, digest) in listed)


def _check_hash(file: Path, name: str, digest: str) -> None:
    if _hash(file) != digest:
        raise ProxpoError(f"{name} is not what was written (sha256 differs)")


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this directory, read without verifying its files."""
    return Checkpoint(**_read(path))


def read_info(path: Path) -> dict[str, Any]:
    """info.json of a checkpoint: its step, its settings and counters."""
    info = unflatten({}, _json(path / "info.json"))
    if not isinstance(info, dict):
        raise ProxpoError("info.json is damaged")
    return info


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest, checked for its form and against the files beside it.

    A file that the manifest no longer lists would be read unchecked, so that is damage too.
    """
    manifest = _json(path / MANIFEST)
    if not isinstance(manifest, dict):
        raise ProxpoError(f"{MANIFEST} is damaged: expected an object with format, parts and files")
    if manifest.get("format") not in READ or isinstance(manifest.get("format"), bool):
        shown = repr(manifest.get("format"))[:40]
        raise ProxpoError(f"format {shown} is none that this version reads, up to {FORMAT}")
    files, parts = manifest.get("files"), manifest.get("parts")
    if not (isinstance(files, dict) and all(_is_entry(entry) for entry in files.items())):
        raise ProxpoError(f"{MANIFEST} is damaged: expected files as NAME: [size, sha256]")
    if not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
        raise ProxpoError(f"{MANIFEST} is damaged: expected parts as a list of names")
    wanted = {"info.json", *(f"{part}{end}" for part in parts for end in (".json", ".safetensors"))}
    listed = {name for name in files if "/" not in name}
    present = {file.name for end in ("json", "safetensors") for file in path.glob(f"*.{end}")}
    further = {name for name in listed if FURTHER.fullmatch(name)}
    for name in sorted(wanted ^ (listed - further) | present - listed - {MANIFEST}):
        raise ProxpoError(f"{MANIFEST} is damaged: {name} is not in its list")
    return manifest


def _is_entry(entry: tuple[str, Any]) -> bool:
    """True for a file inside the checkpoint with its size and hash."""
    name, value = entry
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    whole = isinstance(value, list) and [type(x) for x in value] == [int, str]
    return inside and whole


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ProxpoError(f"{path.name} is missing") from None
    except RecursionError:
        raise ProxpoError(f"{path.name} is damaged: nested too deep") from None
    except ValueError:
        raise ProxpoError(f"{path.name} is damaged: not JSON") from None


def _write(
    folder: Path,
    step: int,
    parts: Mapping[str, Any],
    info: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    write_model: Callable[[Path], None] | None,
) -> None:
    trees = {name: _flat(name, tree) for name, tree in parts.items()}
    first = {name: tensors for name, (tensors, _) in trees.items() if name != WEIGHTS}
    jobs = [job for name, tensors in first.items() for job in _file_jobs(folder, name, tensors)]
    if write_model is not None:
        (folder / "model").mkdir()
        jobs.insert(0, partial(write_model, folder / "model"))
    side_by_side(jobs)
    held: dict[str, tuple[str, str]] = {}
    if WEIGHTS in trees:
        weights, known = trees[WEIGHTS][0], _index(folder)
        side_by_side(partial(_find, folder, known, key, x, held) for key, x in weights.items())
        own = {key: tensor for key, tensor in weights.items() if key not in held}
        side_by_side(_file_jobs(folder, WEIGHTS, own))
    for name, (tensors, structure) in trees.items():
        places = {key: held[key] for key in tensors if name == WEIGHTS and key in held}
        text = json.dumps({"tree": structure, "held": places}, allow_nan=False)
        (folder / f"{name}.json").write_text(text)
    files = {path for path in folder.rglob("*") if path.is_file()}
    listed: dict[str, list] = {}
    side_by_side(partial(_seal, file, folder, listed) for file in files)
    _, plain = flatten({**(info() if callable(info) else info), "step": step}, what="info")
    (folder / "info.json").write_text(json.dumps(plain, allow_nan=False))
    _seal(folder / "info.json", folder, listed)
    files_of = {name: listed[name] for name in sorted(listed)}
    manifest = {"format": FORMAT, "step": step, "parts": list(parts), "files": files_of}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(folder / MANIFEST)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(path)


def _seal(file: Path, folder: Path, listed: dict[str, list]) -> None:
    """Flushes a file to the disk and lists its size and hash."""
    _sync(file)
    listed[str(file.relative_to(folder))] = [file.stat().st_size, _hash(file)]


def _flat(name: str, tree: Any) -> tuple[dict[str, Tensor], Any]:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("info", "manifest", "model"):
        raise ProxpoError(f"'{name}' cannot be the name of a part of a checkpoint")
    return flatten(tree, what=name)


def _file_jobs(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> list[Job]:
    """Writes of the files of a part, at least one; each of up to LARGEST bytes."""
    files: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        if files[-1] and filled + tensor.nbytes > LARGEST:
            files.append({})
            filled = 0
        files[-1][key] = tensor
        filled += tensor.nbytes
    count = range(1, len(files) + 1)
    ends = (f"{name}.{n}.safetensors" if n > 1 else f"{name}.safetensors" for n in count)
    return [partial(save_file, part, folder / end) for part, end in zip(files, ends)]


def _index(folder: Path) -> Index:
    """The tensors in the files of model/ by type, shape and a few of their bytes."""
    known: Index = {}
    for path in sorted((folder / "model").rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                place = (str(path.relative_to(folder)), name)
                known.setdefault(_outline(file.get_tensor(name)), []).append(place)
    return known


def _outline(tensor: Tensor) -> tuple:
    """Type, shape and 32 bytes at the beginning, middle and end."""
    flat, half = _bytes(tensor), tensor.nbytes // 2
    parts = (flat[:32], flat[half : half + 32], flat[-32:])
    return (tensor.dtype, tensor.shape, *(bytes(part.tolist()) for part in parts))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _find(
    folder: Path, known: Index, key: str, tensor: Tensor, held: dict[str, tuple[str, str]]
) -> None:
    """Lists file and name of a tensor of model/ with these very bits, where there is one."""
    for place in known.get(_outline(tensor), ()) if tensor.numel() else ():
        with safe_open(folder / place[0], framework="pt") as file:
            if torch.equal(_bytes(file.get_tensor(place[1])), _bytes(tensor)):
                held[key] = place
                return


def side_by_side(jobs: Iterable[Job]) -> None:
    """Runs the jobs in a few threads, which end with the process; raises the first error."""
    waiting, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while waiting and not errors:
            with contextlib.suppress(IndexError):
                job = waiting.popleft()
                try:
                    job()
                except BaseException as error:
                    errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads[: len(waiting)]:
        thread.start()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def _move_into_place(working: Path, final: Path) -> None:
    aside = final.with_name(f"{final.name}.previous")
    if final.exists():
        _discard(aside)
        final.rename(aside)
    working.rename(final)
    _sync(final.parent)
    _discard(aside)


def _discard(path: Path) -> None:
    """Renames, then deletes: a kill in between leaves nothing that looks whole."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed)


def _read(path: Path) -> dict[str, Any]:
    manifest = _manifest(path)
    parts = {name: _read_part(path, name, manifest) for name in manifest["parts"]}
    info = read_info(path)
    if info["step"] != step_of(path):
        raise ProxpoError(f"info.json is that of step {info['step']}")
    model = path / "model" if (path / "model").is_dir() else None
    return {"path": path, "step": info["step"], "parts": parts, "info": info, "model": model}


def _read_part(path: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    tensors = load_file(path / f"{name}.safetensors")
    written = _json(path / f"{name}.json")
    if manifest["format"] == 1:
        return unflatten(tensors, written)
    for file in path.glob(f"{name}.*.safetensors"):
        tensors |= load_file(file)
    places: dict[str, dict[str, str]] = {}
    for key, (place, other) in written["held"].items():
        if place not in manifest["files"]:
            raise ProxpoError(f"{name}.json names {place}, which {MANIFEST} does not list")
        places.setdefault(place, {})[key] = other
    for place, keys in places.items():
        with safe_open(path / place, framework="pt") as model:
            tensors |= {key: model.get_tensor(other) for key, other in keys.items()}
    return unflatten(tensors, written["tree"])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.strerror} ({Path(error.filename).name})" if error.filename else error.strerror
        )
    reason = re.search(r"I/O error: (.+) \(os error \d+\)", str(error))  # of safetensors
    return reason[1] if reason else " ".join(str(error).split()) or type(error).__name__


__all__ = [
    "DAMAGE",
    "Checkpoint",
    "checkpoints",
    "load_latest",
    "read_checkpoint",
    "read_info",
    "save_checkpoint",
    "step_of",
    "verify",
]
