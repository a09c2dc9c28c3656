"""State of a gradient transform beside verl's checkpoint: one safetensors file."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from proxpo.runs.files import write_whole

TRANSFORM_FILE = "proxpo_transform.safetensors"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the trailing averages; they are the same on every rank, so one file holds them."""
    tensors = {key: torch.as_tensor(value).cpu().contiguous() for key, value in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TRANSFORM_FILE, save(tensors))


def load_state(folder: Path) -> dict[str, Any] | None:
    """Reads what `save_state` has written; None for a checkpoint made without a transform."""
    path = folder / TRANSFORM_FILE
    return load_file(path) if path.exists() else None


__all__ = ["load_state", "save_state"]
