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
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from proxpo.errors import ProxpoError
from proxpo.train.trees import flatten, unflatten

FORMAT = 1
MANIFEST = "manifest.json"
# A step saved again moves the earlier directory aside for a moment; it counts if a kill falls there
NAME = re.compile(r"step-(\d+)(\.previous)?")
UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `skipped` says which later ones were damaged, and how."""

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
    """Write root/step-N and return it once it is on the disk; then prune to `keep_last`.

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
    for old in checkpoints(root)[:-keep_last]:
        _discard(old)
    return final


def load_latest(root: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all as written; None where there never was one.

    Damaged ones are passed over and named in `skipped`; when none is whole, that is an error.
    """
    skipped: list[str] = []
    for path in reversed(checkpoints(root)):
        try:
            verify(path)
            found = _read(path)
            return Checkpoint(**found, skipped=tuple(skipped))
        except (OSError, ProxpoError, SafetensorError, ValueError, KeyError) as error:
            skipped.append(f"{path.name}: {_reason(error)}")
    if skipped:
        raise ProxpoError(f"no usable checkpoint in {root}: {'; '.join(skipped)}")
    return None


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint directories, oldest first."""
    named = [(NAME.fullmatch(path.name), path) for path in Path(root).glob("step-*")]
    steps = [(int(m[1]), m[2] is None, path) for m, path in named if m and path.is_dir()]
    return [path for *_, path in sorted(steps)]


def verify(path: Path) -> None:
    """Raise unless every file is there with the size and hash it was written with."""
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ProxpoError(
            f"format {manifest['format']} is not {FORMAT}, the one this version reads"
        )
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ProxpoError(f"{name} is missing")
        if file.stat().st_size != size:
            raise ProxpoError(f"{name} has {file.stat().st_size} bytes, {size} were written")
        if _hash(file) != digest:
            raise ProxpoError(f"{name} is not what was written (sha256 differs)")


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
    """Rename before deleting, so that a kill in between leaves nothing that looks whole."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed)


def _read(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / MANIFEST).read_text())
    parts = {
        name: unflatten(
            load_file(path / f"{name}.safetensors"),
            json.loads((path / f"{name}.json").read_text()),
        )
        for name in manifest["parts"]
    }
    info = unflatten({}, json.loads((path / "info.json").read_text()))
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
    said = re.search(r"I/O error: (.+) \(os error \d+\)", str(error))  # safetensors' words for it
    return said[1] if said else " ".join(str(error).split()) or type(error).__name__


@dataclass
class StopRequest:
    """Whether the run was asked to save and stop."""

    requested: bool = False
    by: str = field(default="")


@contextlib.contextmanager
def stop_on_signal(*signals: signal.Signals) -> Iterator[StopRequest]:
    """SIGTERM sets a flag, looked at between steps; a second one ends the process at once.

    Outside the main thread, where Python takes no signals, the flag stays down.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: Any) -> None:
        request.requested, request.by = True, signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])

    for one in signals or (signal.SIGTERM,):
        before[one] = signal.signal(one, note)
    try:
        yield request
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


__all__ = [
    "Checkpoint",
    "StopRequest",
    "checkpoints",
    "load_latest",
    "save_checkpoint",
    "stop_on_signal",
    "verify",
]
