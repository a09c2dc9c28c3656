"""One run in a process of its own: `proxpo train`, its output in log.txt, gone with its parent."""

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxpo.compare.state import LOG

# What a run imports: loaded once in the server that all runs are forked from.
PRELOAD = (
    "proxpo.compare.work",
    "proxpo.cli.app",
    "proxpo.train.loop",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.backends.backend_agg",
)


def work(argv: Sequence[str], folder: str, threads: int, env: Mapping[str, str]) -> None:
    """The body of a process that makes one run, in a process group of its own."""
    os.setpgid(0, 0)  # Ctrl-C is for the comparison, which then stops its runs in good order
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(env)
    sys.exit(make_run(argv, Path(folder), threads))


def make_run(argv: Sequence[str], folder: Path, threads: int) -> int:
    """Run `proxpo` with these arguments; its exit code."""
    from proxpo.cli import main

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    import torch

    torch.set_num_threads(threads)
    with alone(folder):
        code = main(list(argv))
    sys.stdout.flush()
    return code


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until nobody else works here: a run that is being killed may take a moment to go."""
    with (folder / ".busy").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leave_with_parent() -> None:
    """A comparison that was killed leaves no run behind; its checkpoints are enough to go on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


__all__ = ["PRELOAD", "alone", "make_run", "work"]
