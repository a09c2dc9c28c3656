"""Exclusive locks between processes, in files that name their owner."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"  # in the folder of a run or of a comparison


class InUse(Exception):
    """Another process holds the lock; the text names it."""


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[str]:
    """Holds the lock file `path`; yields the name of an owner that did not release it, or "".

    The kernel drops the lock with the process, however that ends. Without `wait`, a lock that
    another process holds raises InUse.
    """
    file = path.open("a+")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise InUse(file.read().strip() or "another process") from None
        file.seek(0)
        last_owner = file.read().strip()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield last_owner
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)
    finally:
        with contextlib.suppress(OSError):  # text that could not be written is tried again here
            file.close()


__all__ = ["LOCK", "InUse", "exclusive"]
