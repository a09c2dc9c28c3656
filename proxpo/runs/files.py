"""Single files: written whole or not at all, JSON read without raising."""

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, data: bytes) -> None:
    """Writes beside the target, then renames over it, so that no reader ever sees half a file.

    A pipe or device (`/dev/stdout`) is written to directly: renaming would replace it.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(data)
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the user's name for it, not ours
        raise
    finally:
        partial.unlink(missing_ok=True)


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text, None where it is damaged or nested too deeply."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where the file is missing, damaged or no object."""
    try:
        tree = parse_json(path.read_bytes())
    except OSError:
        return None
    return tree if isinstance(tree, dict) else None


__all__ = ["parse_json", "read_object", "write_whole"]
