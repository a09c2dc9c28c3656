"""One run in a process of its own: its output in log.txt, ended with its parent process.

The process calls the entry point of its pool, MODULE:FUNCTION, with the arguments of the run.
"""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxpo.compare.state import LOG
from proxpo.runs.lock import exclusive


def run_process(
    entry: str,
    argv: Sequence[str],
    folder: str,
    threads: int,
    env: Mapping[str, str],
    gpu_share: float,
) -> None:
    """The body of a process that makes one run, in a process group of its own.

    gpu_share: of the GPU's memory that the run may take; 0: all of it, or there is no GPU
    """
    os.setpgid(0, 0)  # Ctrl-C is for the comparison, which then stops its runs in good order
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.update(env)
    if gpu_share:
        import torch

        torch.cuda.set_per_process_memory_fraction(gpu_share)
    sys.exit(make_run(entry, argv, Path(folder), threads))


def make_run(entry: str, argv: Sequence[str], folder: Path, threads: int) -> int:
    """Calls MODULE:FUNCTION with these arguments, alone in the run's folder; its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    import torch

    torch.set_num_threads(threads)
    # An earlier process of this run that is being killed may take a moment to end.
    with exclusive(folder / ".busy", wait=True):
        module, _, function = entry.partition(":")
        code = getattr(importlib.import_module(module), function)(list(argv))
    sys.stdout.flush()
    return code


def _exit_with_parent() -> None:
    """Kills the run when the comparison is killed; its checkpoints are enough to continue."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


__all__ = ["make_run", "run_process"]
