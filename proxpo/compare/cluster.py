"""Runs on a Ray cluster: one task each, repeated elsewhere when its machine is lost.

The comparison's folder must be on storage that every machine sees: a repeated task continues from
the checkpoint that the lost one left there.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxpo.compare.work import make_run
from proxpo.errors import imported

RETRIES = 3  # of a run whose process or machine is lost


def _task(entry: str, argv: list[str], folder: str, threads: int, directory: str) -> int:
    """The body of a Ray task: the run in the worker's own process, so that both end together."""
    os.chdir(directory)
    return make_run(entry, argv, Path(folder), threads)


class RayPool:
    """Makes runs as Ray tasks, at most `jobs` at a time; Ray decides when and where."""

    def __init__(
        self, entry: str, *, jobs: int | None = None, threads: int = 1, gpus: float = 0.0
    ) -> None:
        self._ray = imported("ray", "--on ray needs Ray: pip install 'proxpo[ray]'")
        if not self._ray.is_initialized():
            # The address in RAY_ADDRESS, a cluster that runs on this machine, or else a new one.
            self._ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        self.entry, self.jobs, self.threads = entry, jobs, threads
        # A new process for each run: nothing of one is left when the next begins.
        remote = self._ray.remote(max_calls=1, max_retries=RETRIES, num_cpus=threads, num_gpus=gpus)
        self._task = remote(_task)
        self._running: dict[Any, str] = {}

    @property
    def room(self) -> int:
        """Number of runs that may be handed to Ray now."""
        return sys.maxsize if self.jobs is None else self.jobs - len(self._running)

    def start(self, name: str, argv: Sequence[str], folder: Path) -> None:
        """Hands a run to Ray."""
        arguments = (self.entry, list(argv), str(folder), self.threads, os.getcwd())
        self._running[self._task.options(name=name).remote(*arguments)] = name

    def finished(self, timeout: float) -> list[tuple[str, str]]:
        """Runs that have ended, each with the cause if something else ended it."""
        if not self._running:
            return []
        waiting = list(self._running)
        ended, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=timeout)
        return [(self._running.pop(task), self._ending(task)) for task in ended]

    def stop(self, *, grace: float) -> None:
        """Interrupts the tasks; those that have not ended in `grace` seconds are killed."""
        for task in self._running:
            self._ray.cancel(task, force=False)
        until = time.monotonic() + grace
        while self._running and time.monotonic() < until:
            self.finished(0.5)
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()

    def _ending(self, task: Any) -> str:
        errors = self._ray.exceptions
        try:
            self._ray.get(task)
        except errors.OutOfMemoryError:
            return "killed by Ray: its machine ran out of memory"
        except (errors.WorkerCrashedError, errors.NodeDiedError):
            return f"its process was lost {RETRIES + 1} times"
        except errors.RayError as error:
            return " ".join(str(error).split())[-300:]
        return ""


__all__ = ["RayPool"]
