"""Which settings a resumed run takes: its own, wherever its folder lies now."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.checkpoint import DAMAGE, checkpoints, read_info, verify
from proxpo.train.config import build, find, read_yaml, write_config


def own_config(
    source: str | None, overrides: Mapping[str, Any], *, noted: Callable[[str], None]
) -> tuple[str | None, dict[str, Any]]:
    """CONFIG and overrides of `--resume`: a run's own settings unless others are given.

    `--out DIR` alone takes DIR/config.yaml. A config.yaml beside checkpoints stands for its folder,
    whatever `out` it was started with, so that a run can be moved.
    """
    given = dict(overrides)
    if source is None and "out" in given:
        own = Path(given["out"]) / "config.yaml"
        if checkpoints(own.parent / "checkpoints"):
            _mend(own, noted)
            source = str(own)
    elif source is not None and "out" not in given:
        own = find(source)
        if checkpoints(own.parent / "checkpoints"):
            _mend(own, noted)
            given["out"] = str(own.parent)
    return source, given


def _mend(path: Path, noted: Callable[[str], None]) -> None:
    """A run's config.yaml that cannot be read is written anew from its newest checkpoint."""
    try:
        if read_yaml(path):
            return
        reason = f"{path} is empty"
    except ProxpoError as error:
        reason = str(error)
    for folder in reversed(checkpoints(path.parent / "checkpoints")):
        try:
            verify(folder)
            config = build(read_info(folder)["config"])
        except DAMAGE:
            continue
        write_config(config, path)
        noted(f"{reason}; written anew from {folder.name}")
        return


__all__ = ["own_config"]
