"""Checkpoints that survive a kill at any moment: safetensors + JSON, hashed, put in place whole.

    step-40/manifest.json      sha256 and size of every other file
            info.json          step, counters, whatever JSON the trainer hands in
            <part>.safetensors its tensors
            <part>.json        the structure around them
            model/             weights as transformers loads them, when asked for

A directory called step-N is complete by construction: it is written under another name, flushed to
the disk, then renamed. Older ones go only after that.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from proxpo.errors import ProxpoError
from proxpo.runs.trees import flatten, unflatten

FORMAT = 1
MANIFEST = "manifest.json"
# A step saved again moves the earlier directory aside for a moment; it counts if a kill falls there
NAME = re.compile(r"step-(\d+)(\.previous)?")
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
    info: Mapping[str, Any],
    *,
    keep_last: int = 2,
    write_model: Callable[[Path], None] | None = None,
) -> Path:
    """Writes root/step-N, deletes all but the last `keep_last`, and returns the new one.

    A part is any nesting of dicts, lists, numbers and tensors, such as a state dict.
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
            return Checkpoint(**_read(path), skipped=tuple(skipped))
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
    manifest = _manifest(path)
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ProxpoError(f"{name} is missing")
        if file.stat().st_size != size:
            raise ProxpoError(f"{name} has {file.stat().st_size} bytes, {size} were written")
        if _hash(file) != digest:
            raise ProxpoError(f"{name} is not what was written (sha256 differs)")


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
    if manifest.get("format") != FORMAT:
        shown = repr(manifest.get("format"))[:40]
        raise ProxpoError(f"format {shown} is not {FORMAT}, the one this version reads")
    files, parts = manifest.get("files"), manifest.get("parts")
    if not (isinstance(files, dict) and all(_is_entry(entry) for entry in files.items())):
        raise ProxpoError(f"{MANIFEST} is damaged: expected files as NAME: [size, sha256]")
    if not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
        raise ProxpoError(f"{MANIFEST} is damaged: expected parts as a list of names")
    wanted = {"info.json", *(f"{part}{end}" for part in parts for end in (".json", ".safetensors"))}
    listed = {name for name in files if "/" not in name}
    present = {file.name for end in ("json", "safetensors") for file in path.glob(f"*.{end}")}
    for name in sorted(wanted ^ listed | present - listed - {MANIFEST}):
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
    info: Mapping[str, Any],
    write_model: Callable[[Path], None] | None,
) -> None:
    for name, tree in parts.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in ("info", "manifest", "model"):
            raise ProxpoError(f"'{name}' cannot be the name of a part of a checkpoint")
        tensors, structure = flatten(tree, what=name)
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(structure, allow_nan=False))
    _, plain = flatten({**info, "step": step}, what="info")
    (folder / "info.json").write_text(json.dumps(plain, allow_nan=False))
    if write_model is not None:
        (folder / "model").mkdir()
        write_model(folder / "model")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        _sync(file)
    listed = {str(f.relative_to(folder)): [f.stat().st_size, _hash(f)] for f in files}
    manifest = {"format": FORMAT, "step": step, "parts": list(parts), "files": listed}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(folder / MANIFEST)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(path)


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
    parts = {
        name: unflatten(load_file(path / f"{name}.safetensors"), _json(path / f"{name}.json"))
        for name in _manifest(path)["parts"]
    }
    info = read_info(path)
    if info["step"] != step_of(path):
        raise ProxpoError(f"info.json is that of step {info['step']}")
    model = path / "model" if (path / "model").is_dir() else None
    return {"path": path, "step": info["step"], "parts": parts, "info": info, "model": model}


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
    "read_info",
    "save_checkpoint",
    "step_of",
    "verify",
]
