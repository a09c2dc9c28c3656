"""Settings of a resumed run: its own, wherever its folder lies now."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.checkpoint import DAMAGE, checkpoints, read_info, verify
from proxpo.runs.jsonlines import OnNotice
from proxpo.runs.yaml_file import read_yaml
from proxpo.train.config import build_config, find, write_config


def own_config(
    source: str | None, overrides: Mapping[str, Any], *, on_notice: OnNotice
) -> tuple[str | None, dict[str, Any]]:
    """CONFIG and overrides of `--resume`: a run's own settings where no others are given.

    `--out DIR` alone takes DIR/config.yaml, also where the run has no checkpoint and begins anew; a
    folder without a run is refused, unless a method says what to begin. A config.yaml beside
    checkpoints stands for its folder, whatever `out` it was started with, so that a run can be
    moved.
    """
    changed = dict(overrides)
    if source is None and "out" in changed:
        own = Path(changed["out"]) / "config.yaml"
        saved = checkpoints(own.parent / "checkpoints")
        if not saved and not own.is_file():
            if changed.get("method") is None:
                raise ProxpoError(f"{own.parent} holds no run to continue")
            return None, changed
        if not saved:
            on_notice(f"{own.parent} has no checkpoint: it begins anew with its own settings")
        _restore_config(own, on_notice)
        source = str(own)
    elif source is not None and "out" not in changed:
        own = find(source)
        if checkpoints(own.parent / "checkpoints"):
            _restore_config(own, on_notice)
            changed["out"] = str(own.parent)
    return source, changed


def _restore_config(path: Path, on_notice: OnNotice) -> None:
    """Writes a config.yaml that cannot be read anew, from the newest intact checkpoint."""
    try:
        if read_yaml(path):
            return
        reason = f"{path} is empty"
    except ProxpoError as error:
        reason = str(error)
    for folder in reversed(checkpoints(path.parent / "checkpoints")):
        try:
            verify(folder)
            config = build_config(read_info(folder)["config"])
        except DAMAGE:
            continue
        write_config(config, path)
        on_notice(f"{reason}; written anew from {folder.name}")
        return


__all__ = ["own_config"]
