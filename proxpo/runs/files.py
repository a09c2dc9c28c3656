"""Files a user gets: whole or not at all."""

import os
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Write beside the target, then rename over it, so that no reader ever sees half a file.

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


__all__ = ["write_whole"]
