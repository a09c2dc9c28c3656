"""Runs on a Ray cluster: one task each, made again elsewhere when its machine is lost.

The comparison's folder must be on storage that every machine sees: a task that is made again
continues from the checkpoint the lost one left there.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxpo.compare.work import make_run
from proxpo.errors import ProxpoError

RETRIES = 3  # how often a run whose process or machine is lost is made again


def _task(argv: list[str], folder: str, threads: int, where: str) -> int:
    """The body of a Ray task: the run in the worker's own process, so that both die together."""
    os.chdir(where)
    return make_run(argv, Path(folder), threads)


class RayPool:
    """Runs as Ray tasks; Ray decides when and where, `jobs` limits how many are handed to it."""

    def __init__(self, *, jobs: int | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        self._ray = _ray()
        if not self._ray.is_initialized():
            # The address in RAY_ADDRESS, a cluster that runs on this machine, or else a new one.
            self._ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        self.jobs, self.threads = jobs, threads
        # A new process for each run: nothing of one is left when the next begins.
        remote = self._ray.remote(max_calls=1, max_retries=RETRIES, num_cpus=threads, num_gpus=gpus)
        self._task = remote(_task)
        self._running: dict[Any, str] = {}

    @property
    def room(self) -> int:
        """How many more runs may be handed to Ray now."""
        return sys.maxsize if self.jobs is None else self.jobs - len(self._running)

    def start(self, name: str, argv: Sequence[str], folder: Path) -> None:
        """Hand a run to Ray."""
        given = (list(argv), str(folder), self.threads, os.getcwd())
        self._running[self._task.options(name=name).remote(*given)] = name

    def finished(self, timeout: float) -> list[tuple[str, str]]:
        """Runs that have ended, each with how it ended if that was not by itself."""
        if not self._running:
            return []
        waiting = list(self._running)
        ended, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=timeout)
        return [(self._running.pop(one), self._ending(one)) for one in ended]

    def stop(self, *, grace: float) -> None:
        """Interrupt the tasks; those that have not ended in `grace` seconds are killed."""
        for one in self._running:
            self._ray.cancel(one, force=False)
        until = time.monotonic() + grace
        while self._running and time.monotonic() < until:
            self.finished(0.5)
        for one in self._running:
            self._ray.cancel(one, force=True)
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


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ProxpoError("--on ray needs Ray: pip install 'proxpo[ray]'") from None
    return ray


__all__ = ["RayPool"]
