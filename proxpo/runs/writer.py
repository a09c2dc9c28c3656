"""Writes checkpoints beside the work that goes on, from copies of the tensors in host memory."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.ops.shapes import Tensor
from proxpo.runs.checkpoint import save_checkpoint


class Saved(NamedTuple):
    """A checkpoint that has been written, its bytes and the seconds that it took."""

    step: int
    size: int
    seconds: float


class HostCopy:
    """Copies the tensors of nested state into host memory; a tensor that comes twice, once."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Tensor, Tensor]] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            place = (tree.data_ptr(), tree.shape, tree.stride(), tree.dtype, tree.device)
            if place not in self._made:
                self._made[place] = (tree, tree.detach().to("cpu", copy=True))
            return self._made[place][1]
        if isinstance(tree, Mapping):
            return {key: self(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self, tree)) if type(tree) in (list, tuple) else tree
        return tree


class CheckpointWriter:
    """Writes one checkpoint at a time: tensors from `begin` on, the rest at `commit`.

    Between the two nothing may change that a checkpoint holds. An error of writing is raised by
    the next `begin`, `check` or `wait`. Without `beside` all is written in `commit`, from the
    tensors themselves. on_saved: called in the writer's thread when a checkpoint is in its place
    """

    def __init__(self, root: Path, *, on_saved: Callable[[Saved], None]) -> None:
        self.root, self.on_saved = root, on_saved
        self.step: int | None = None  # of the newest checkpoint that was begun
        self._thread: threading.Thread | None = None
        self._info: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._write: Callable[[], None] = lambda: None

    def begin(
        self,
        step: int,
        parts: Mapping[str, Any],
        write_model: Callable[[Path], None] | None,
        *,
        keep: int,
        beside: bool,
    ) -> None:
        """Starts with the tensors of `parts` and `write_model`, which nothing else may change."""
        self.wait()
        self.step = step

        def write() -> None:
            started = time.perf_counter()
            try:
                path = save_checkpoint(
                    self.root, step, parts, self._take, keep_last=keep, write_model=write_model
                )
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                self.on_saved(Saved(step, size, time.perf_counter() - started))
            except _Abandoned:
                pass
            except BaseException as error:
                self._error = error

        self._write = write
        if beside:
            self._thread = threading.Thread(target=write, daemon=True)
            self._thread.start()

    def commit(self, info: Mapping[str, Any]) -> None:
        """Ends the checkpoint that was begun with the rest of its state."""
        self._info.put(info)
        if self._thread is None:
            self._write()
            self.check()

    def check(self) -> None:
        """Raises the error that a checkpoint ended with."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Returns when the checkpoint that was committed is in its place."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _take(self) -> Mapping[str, Any]:
        info = self._info.get()
        if info is None:
            raise _Abandoned
        return info

    def close(self, *, wait: bool = True) -> None:
        """Leaves out a checkpoint that was begun and never committed; waits for one that was."""
        if self._thread is not None:
            self._info.put(None)
            if wait:
                self._thread.join()
            self._thread = None


class _Abandoned(Exception):
    pass
