"""Runs on this machine, each a process forked from one that has already imported torch.

Importing torch and transformers takes several seconds; a run forked from a server that has done so
starts in a fraction of one. A crash (a segfault, the kernel's out-of-memory killer) ends one run
alone.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxpo.compare.work import run_process

# Imports of every run, loaded once in the server that all runs are forked from.
PRELOAD = (
    "proxpo.compare.work",
    "proxpo.train.loop",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.backends.backend_agg",
)
CONTEXT = 0.06  # share of a GPU's memory that stays outside torch's allocators


class LocalPool:
    """Makes at most `jobs` runs at a time, with `threads` threads each, spread over the GPUs.

    Runs that share a GPU get equal parts of its memory.

    entry: MODULE:FUNCTION, called with the arguments of each run; preload: modules it imports.
    """

    def __init__(
        self,
        entry: str,
        *,
        jobs: int | None = None,
        threads: int | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self.entry = entry
        cores, self.gpus = len(os.sched_getaffinity(0)), _gpus()
        self.jobs = jobs or (self.gpus or cores)
        self.devices = _devices(self.gpus)
        self.threads = threads or max(1, cores // self.jobs)
        sharing = -(-self.jobs // self.gpus) if self.gpus else 1  # runs on each GPU
        self.gpu_share = round((1 - CONTEXT) / sharing, 4) if sharing > 1 else 0.0
        self._free = list(range(self.jobs))
        self._running: dict[str, tuple[Any, int]] = {}
        self._context: Any = multiprocessing.get_context(
            "forkserver" if sys.platform == "linux" else "spawn"
        )
        if sys.platform == "linux":
            self._context.set_forkserver_preload([*PRELOAD, *preload])

    @property
    def room(self) -> int:
        """Number of runs that may start now."""
        return len(self._free)

    def start(self, name: str, argv: Sequence[str], folder: Path) -> None:
        """Starts a run."""
        slot = self._free.pop(0)
        env = {"OMP_NUM_THREADS": str(self.threads)}
        if self.gpus > 1:
            env["CUDA_VISIBLE_DEVICES"] = self.devices[slot % self.gpus]
        process = self._context.Process(
            target=run_process,
            args=(self.entry, list(argv), str(folder), self.threads, env, self.gpu_share),
            name=name,
        )
        with _environment(env):  # the first start is the server's: OpenMP reads it on loading
            process.start()
        self._running[name] = (process, slot)

    def finished(self, timeout: float) -> list[tuple[str, str]]:
        """Runs that have ended, each with the cause if something else ended it."""
        sentinels = {process.sentinel: name for name, (process, _) in self._running.items()}
        if not sentinels:
            return []
        ended = multiprocessing.connection.wait(list(sentinels), timeout)
        return [self._collect(sentinels[sentinel]) for sentinel in ended]  # type: ignore[index]

    def stop(self, *, grace: float) -> None:
        """Asks every run to save and stop; kills those that have not done so in `grace` seconds."""
        try:
            for process, _ in self._running.values():
                _signal(process.pid, signal.SIGTERM, group=False)
            until = time.monotonic() + grace
            for process, _ in self._running.values():
                process.join(max(0.0, until - time.monotonic()))
        finally:  # also on a second Ctrl-C
            for process, _ in self._running.values():
                _signal(process.pid, signal.SIGKILL, group=True)
                process.join()
            self._running.clear()

    def _collect(self, name: str) -> tuple[str, str]:
        process, slot = self._running.pop(name)
        process.join()
        self._free.append(slot)
        code = process.exitcode
        if code is None or code >= 0:
            return name, ""
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return name, f"killed by {signal.Signals(-code).name}{hint}"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _devices(gpus: int) -> list[str]:
    """Names of the GPUs in CUDA_VISIBLE_DEVICES: numbers or UUIDs, of those that are visible."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in given.split(",") if name.strip()]
    return named[:gpus] if len(named) >= gpus else [str(number) for number in range(gpus)]


__all__ = ["LocalPool"]
