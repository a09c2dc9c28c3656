"""The folder of a run: one process at a time, and as it was before if the run never begins.

    summary.json   at the true end of a run, never before
    failure.json   why the last attempt ended early: {reason, step, phase, type}

A run that was stopped or killed has neither: --resume continues it.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from proxpo.errors import ProxpoError
from proxpo.runs.files import write_whole

LOCK = ".lock"
SUMMARY = "summary.json"
FAILURE = "failure.json"


@contextlib.contextmanager
def held(out: Path, *, noted: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Make the folder and hold it; a block that fails before writing anything leaves no trace."""
    made = [path for path in (out, *out.parents) if not path.exists()]
    lock: IO[str] | None = None
    try:
        lock = _locked(out, noted)
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.truncate(0)
            lock.close()
        if made:
            _remove_if_empty(out, made)


def _locked(out: Path, noted: Callable[[str], None]) -> IO[str]:
    """The open lock file. The kernel drops the lock with the process, however that ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("a+")
    except (FileExistsError, NotADirectoryError):
        raise ProxpoError(f"out: {out} is or lies below a file, expected a folder") from None
    except OSError as error:
        raise ProxpoError(f"out: {out} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        if last := lock.read().strip():
            noted(f"the last run in {out} ({last}) did not end in order; its lock is taken over")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        raise ProxpoError(f"out: {out} is in use by {owner}; --out starts another run") from None
    except OSError as error:
        _close(lock)
        raise ProxpoError(f"out: {out} cannot be written: {error.strerror}") from None
    return lock


def _close(lock: IO[str]) -> None:
    with contextlib.suppress(OSError):  # what could not be written is not tried again
        lock.close()


def _remove_if_empty(out: Path, made: list[Path]) -> None:
    with contextlib.suppress(OSError):
        if os.listdir(out) == [LOCK]:
            (out / LOCK).unlink()
        for path in made:
            path.rmdir()


def write_failure(out: Path, *, reason: str, step: int, phase: str, kind: str) -> None:
    """failure.json, as far as the disk allows: the reason is also what the user is told."""
    record = {"reason": reason, "step": step, "phase": phase, "type": kind}
    with contextlib.suppress(OSError):
        write_whole(out / FAILURE, json.dumps(record, indent=1).encode())


def write_summary(out: Path, summary: Mapping[str, Any]) -> None:
    """summary.json: the run has reached its end."""
    write_whole(out / SUMMARY, json.dumps(summary, indent=1).encode())


def begin(out: Path) -> None:
    """The run goes (on): what an earlier attempt said of its end no longer holds."""
    for name in (SUMMARY, FAILURE):
        (out / name).unlink(missing_ok=True)


__all__ = ["begin", "held", "write_failure", "write_summary"]
