"""Fingerprints of the local files that a run reads: weights, problems, reward.

A path is not enough to know a run by: other weights may lie under it later.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from proxpo.errors import ProxpoError
from proxpo.runs.files import read_object, write_whole
from proxpo.train._schema import Config

SOURCES = "sources.json"
WHOLE = 64 << 20  # bytes of a file that is read whole
PART = 1 << 20  # bytes at the beginning, middle and end of a larger one


def fingerprints(config: Config) -> dict[str, str]:
    """SHA-256 of what each setting names, where that is a file or a folder of weights here."""
    named = {
        "model.name": sorted(Path(config.model.name).glob("*.safetensors")),
        "task.name": [Path(config.task.name)],
        "task.reward": [Path(str(config.task.reward).rpartition(":")[0])],
    }
    local = {key: [path for path in paths if path.is_file()] for key, paths in named.items()}
    return {key: _digest(paths) for key, paths in local.items() if paths}


def write_sources(config: Config, folder: Path) -> None:
    """Records the fingerprints at the start of a run; without local files there is no record."""
    (folder / SOURCES).unlink(missing_ok=True)
    if found := fingerprints(config):
        write_whole(folder / SOURCES, json.dumps(found, indent=1).encode())


def check_sources(config: Config, folder: Path) -> None:
    """Refuses to go on with other files than those that the run began with."""
    recorded = read_object(folder / SOURCES) or {}
    present = fingerprints(config)
    for key in recorded.keys() & present.keys():
        if recorded[key] != present[key]:
            section, name = key.split(".")
            path = getattr(getattr(config, section), name)
            raise ProxpoError(f"{key}: {path} has changed since the run in {folder} began")


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                total.update(file.read())
                continue
            for start in (0, size // 2, size - PART):
                file.seek(start)
                total.update(file.read(PART))
    return total.hexdigest()


__all__ = ["SOURCES", "check_sources", "fingerprints", "write_sources"]
