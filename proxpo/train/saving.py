"""Checkpoints of a run: size and room beforehand, then writing beside the steps that follow."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from proxpo.errors import ProxpoError
from proxpo.ops.memory import host_memory
from proxpo.ops.shapes import Tensor
from proxpo.report.text import size_text
from proxpo.runs.checkpoint import checkpoints
from proxpo.runs.writer import CheckpointWriter, HostCopy, Saved
from proxpo.train.faults import Progress
from proxpo.train.job import Job, whole_info


class Saver:
    """Writes the checkpoints of a run from copies, where host memory has room for them.

    step: of the newest checkpoint that was begun; at: gets the newest that is in its place
    """

    def __init__(
        self, job: Job, root: Path, at: Progress, on_notice: Callable[[str], None]
    ) -> None:
        self.job, self.root, self.at, self.on_notice = job, root, at, on_notice
        self._writer = CheckpointWriter(root, on_saved=self._saved)
        self._done: list[Saved] = []
        self.step: int | None = at.saved
        self._open = False  # one was begun and not committed

    @property
    def asked(self) -> bool:
        """True for a run that keeps checkpoints."""
        return self.job.config.checkpoint.keep > 0

    def due(self, step: int) -> bool:
        """True where settings ask for a checkpoint after a step."""
        return self.asked and due(step, self.job.config.checkpoint.every, self._last)

    def announce(self) -> None:
        """Says what a checkpoint takes; refuses a run whose checkpoints do not fit on the disk."""
        steps = [s for s in range(self.job.step + 1, self._last + 1) if self.due(s)]
        if not steps:
            return
        size, free = self.size(), shutil.disk_usage(_existing(self.root)).free
        keep, there = self.job.config.checkpoint.keep, len(checkpoints(self.root))
        count = max(1, min(there + len(steps) - 1, keep) + 1 - there)  # until the oldest goes
        if count * size > free:
            each = f", {count} of {size_text(size)} at a time" if count > 1 else ""
            raise ProxpoError(
                f"checkpoints in {self.root} take about {size_text(count * size)}{each}, and "
                f"{size_text(free)} are free: make room, choose another --out, or set "
                "checkpoint.every=0 (the end alone), checkpoint.keep=1 or 0 (none)"
            )
        where = "as much memory while it is written beside the steps"
        if not self._beside(size):
            where = (
                f"written between the steps, since {size_text(host_memory())} of memory are free"
            )
        self.on_notice(
            f"a checkpoint takes about {size_text(size)} of the {size_text(free)} that are free in "
            f"{self.root}, {where}"
        )

    def size(self) -> int:
        """About the bytes of a checkpoint, once the first step has made the optimizer's state."""
        places = {(x.data_ptr(), x.nbytes) for x in _tensors(self.job.parts())}
        return sum(nbytes for _, nbytes in places) + self.job.state_to_come

    def begin(self) -> None:
        """Starts the checkpoint of the job's step; nothing it holds may change until `commit`."""
        self.wait()
        self.at.phase = "checkpoint"
        beside = self._beside(self.size())
        copied = HostCopy() if beside else _as_it_is
        self._writer.begin(
            self.job.step,
            copied(self.job.parts()),
            self.job.model_writer(copied),
            keep=self.job.config.checkpoint.keep,
            beside=beside,
        )
        self.step, self._open = self.job.step, True

    def commit(self) -> None:
        """Ends the checkpoint that was begun, if one was, with the job's progress as it is now."""
        if self._open:
            self._open, self.at.phase = False, "checkpoint"
            self._writer.commit(whole_info(self.job))

    def check(self) -> None:
        """Says what has been written since; raises the error of writing."""
        while self._done:
            saved = self._done.pop(0)
            self.on_notice(
                f"checkpoint of step {saved.step}: {size_text(saved.size)} written in "
                f"{saved.seconds:.1f} s"
            )
        self._raise(self._writer.check)

    def wait(self) -> None:
        """Returns when every checkpoint that was committed is in its place."""
        self._raise(self._writer.wait)
        self.check()

    def close(self, *, wait: bool = True) -> None:
        """Gives up a checkpoint that was begun alone; waits for one that was committed."""
        self._writer.close(wait=wait)

    def _raise(self, call: Callable[[], None]) -> None:
        phase, self.at.phase = self.at.phase, "checkpoint"
        call()
        self.at.phase = phase

    def _saved(self, saved: Saved) -> None:
        self.at.saved = saved.step
        self._done.append(saved)

    def _beside(self, size: int) -> bool:
        """True where a copy leaves half of the free memory to the run."""
        return 2 * size < host_memory()

    @property
    def _last(self) -> int:
        return self.job.config.train.steps


def due(step: int, every: int, last: int) -> bool:
    """True for every so many steps and for the last."""
    return step == last or (every > 0 and step % every == 0)


class Stopwatch:
    """Seconds since it was made, for a line on a part of a run: `4.2 s`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __str__(self) -> str:
        return f"{time.perf_counter() - self._start:.1f} s"


def _as_it_is(tree: Any) -> Any:
    return tree


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


__all__ = ["Saver", "Stopwatch", "due"]
