"""Settings of a resumed run: its own, wherever its folder lies now."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.runs.checkpoint import DAMAGE, checkpoints, read_info, verify
from proxpo.runs.jsonlines import METRICS, OnNotice
from proxpo.runs.yaml_file import read_yaml
from proxpo.train.config import (
    Config,
    build_config,
    differences,
    find,
    load_config,
    write_config,
)


def own_config(
    source: str | None, overrides: Mapping[str, Any], *, on_notice: OnNotice
) -> tuple[str | None, dict[str, Any]]:
    """CONFIG and overrides of `--resume`: a run's own settings where no others are given.

    `--out DIR` alone takes DIR/config.yaml, with checkpoints or without; a folder without a run is
    refused, unless a method says what to begin. A config.yaml beside checkpoints stands for its
    folder, whatever `out` it was started with, so that a run can be moved.
    """
    changed = dict(overrides)
    if source is None and "out" in changed:
        own = Path(changed["out"]) / "config.yaml"
        if own.is_file() or checkpoints(own.parent / "checkpoints"):
            _restore_config(own, on_notice)
            source = str(own)
        elif "method" not in changed:
            raise ProxpoError(f"{own.parent} holds no run to continue")
    elif source is not None and "out" not in changed:
        own = find(source)
        if checkpoints(own.parent / "checkpoints") or (own.parent / METRICS).is_file():
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
    raise ProxpoError(f"{reason}, and no checkpoint beside it is intact")


def begin_anew(out: Path, config: Config, on_notice: OnNotice) -> None:
    """Reports that a run without a checkpoint begins anew; refuses a run of something else."""
    path = out / "config.yaml"
    if not path.is_file():
        on_notice(f"{out} holds no run to continue: a new one begins")
        return
    try:
        changed = differences(load_config(path), config)
    except ProxpoError:  # it cannot be read, and the settings come from elsewhere
        changed = []
    fixed = [str(change) for change in changed if change.resume == "fixed"]
    if fixed:
        raise ProxpoError(
            f"{out} does not fit these settings ({'; '.join(fixed)}): a run keeps what it was "
            "started with; --out DIR begins a new one"
        )
    on_notice(f"{out} has no checkpoint: it begins anew")


__all__ = ["begin_anew", "own_config"]
