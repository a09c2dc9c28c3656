"""Fingerprints of the local files that a run reads: weights, problems, reward.

A path is not enough to know a run by: other weights may lie under it later.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError, fold
from proxpo.models import SHIPPED
from proxpo.runs.files import read_object, write_whole
from proxpo.train._schema import Config, TaskConfig

SOURCES = "sources.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
WHOLE = 64 << 20  # bytes of a file that is read whole
PART = 1 << 20  # bytes at the beginning, middle and end of a larger one


def fingerprints(model: str, task: TaskConfig) -> dict[str, str]:
    """SHA-256 of each local file that the settings name; a model of the hub has none."""
    folder = model_folder(model)
    paths = [path for glob in WEIGHTS for path in sorted(folder.glob(glob))] if folder else []
    files = {f"{model}/{path.name}": path for path in paths}
    files |= {str(path): path for path in (*_problem_files(task), _reward(task))}
    return {name: _digest(path) for name, path in files.items() if path.is_file()}


def write_sources(files: Mapping[str, str], folder: Path) -> None:
    """Records the fingerprints at the start of a run; without local files there is no record."""
    (folder / SOURCES).unlink(missing_ok=True)
    if files:
        write_whole(folder / SOURCES, json.dumps(files, indent=1).encode())


def check_sources(files: Mapping[str, str], folder: Path) -> None:
    """Refuses to go on with other files than those that the run began with.

    A run without a record goes on. A file that is missing is left to the code that reads it.
    """
    recorded = read_object(folder / SOURCES)
    changed = changed_file(files, recorded)
    if changed:
        raise ProxpoError(f"{changed} has changed since this run began; --out DIR begins another")


def changed_file(files: Mapping[str, str], recorded: Mapping[str, Any] | None) -> str:
    """The first file that is not as it was recorded; "" for none, and without a record."""
    known = files if recorded is None else recorded
    return next((name for name, digest in files.items() if known.get(name) != digest), "")


def model_folder(name: str) -> Path | None:
    """Folder of a local model; None for a model that ships with proxpo and for one of the hub."""
    folder = Path(name).expanduser()
    return folder if name not in SHIPPED and folder.is_dir() else None


def whole_paths(text: str, config: Config) -> str:
    """The text of a setting, the local files that it names by their absolute paths."""
    folder = model_folder(config.model.name)
    named = {*([folder] if folder else []), *_problem_files(config.task), _reward(config.task)}
    named = {path for path in named if path.expanduser().exists()}
    return ":".join(
        str(Path(part).expanduser().absolute()) if part and Path(part) in named else part
        for part in text.split(":")
    )


def _problem_files(task: TaskConfig) -> list[Path]:
    """The files of problems that a task names, whether they are there or not."""
    head, _, rest = task.name.partition(":")
    if re.search(r"\.jsonl?$|[/\\]", head):
        return [Path(task.name), Path(str(task.options.get("test") or ""))]
    if fold(head) != "gsm8k":
        return []
    path = Path(str(task.options.get("path") or rest))
    return [path, path / "train.jsonl", path / "test.jsonl"]


def _reward(task: TaskConfig) -> Path:
    return Path(str(task.options.get("reward") or task.reward).rpartition(":")[0])


def _digest(path: Path) -> str:
    """SHA-256 of a file; of a large one, of its size and of three parts."""
    total, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            total.update(file.read())
            return total.hexdigest()
        total.update(f"{size}\n".encode())
        for start in (0, size // 2, size - PART):
            file.seek(start)
            total.update(file.read(PART))
    return total.hexdigest()


__all__ = [
    "SOURCES",
    "changed_file",
    "check_sources",
    "fingerprints",
    "model_folder",
    "whole_paths",
    "write_sources",
]
