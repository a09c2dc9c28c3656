"""The folder of a run: one process at a time, and removed again if the run never begins."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from proxpo.errors import ProxpoError
from proxpo.runs.lock import LOCK, InUse, exclusive


@contextlib.contextmanager
def hold_folder(
    out: Path, *, on_notice: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Makes the folder and locks it; a block that writes nothing leaves no folder behind."""
    created = [path for path in (out, *out.parents) if not path.exists()]
    with contextlib.ExitStack() as stack:
        if created:
            stack.callback(_remove_if_empty, out, created)
        try:
            out.mkdir(parents=True, exist_ok=True)
            last_owner = stack.enter_context(exclusive(out / LOCK))
        except InUse as owner:
            raise ProxpoError(
                f"out: {out} is in use by {owner}; --out starts another run"
            ) from None
        except (FileExistsError, NotADirectoryError):
            raise ProxpoError(f"out: {out} is or lies below a file, expected a folder") from None
        except OSError as error:
            raise ProxpoError(f"out: {out} cannot be written: {error.strerror}") from None
        if last_owner:
            on_notice(
                f"the last run in {out} ({last_owner}) did not end in order; its lock is taken over"
            )
        yield


def _remove_if_empty(out: Path, created: list[Path]) -> None:
    with contextlib.suppress(OSError):
        if os.listdir(out) == [LOCK]:
            (out / LOCK).unlink()
        for path in created:
            path.rmdir()


__all__ = ["hold_folder"]
