"""What ends a run, in one line: what failed, in which phase, which setting helps, what is safe."""

import contextlib
import errno
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from proxpo.errors import ProxpoError
from proxpo.runs.folder import write_failure
from proxpo.train.config import Config, explain

_NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can(?:'t|not) allocate memory|alloc_failed|bad_alloc", re.I
)
# Which settings help against a lack of memory, the most effective and least costly first.
_HELP = {
    "loading": ("lora", "dtype"),
    "rollout": ("max_rows", "max_tokens", "dtype", "lora"),
    "update": ("micro_batch", "gradient_checkpointing", "max_tokens", "dtype", "lora"),
    "evaluate": ("micro_batch", "max_rows", "max_tokens", "dtype", "lora"),
}
_PATHS = {"lora": "model.lora", "max_tokens": "rollout.max_tokens", "dtype": "model.dtype"}


@dataclass
class Progress:
    """How far a run has come, for whoever has to say where it ended.

    saved: step of the newest intact checkpoint
    """

    phase: str = "loading"
    step: int = 0
    saved: int | None = None


@contextlib.contextmanager
def explained(out: Path, config: Config) -> Iterator[Progress]:
    """Errors of the block in one line that says what is safe; failure.json for a run that began.

    A mistake in the input that shows before the first checkpoint is no failed run: it leaves
    nothing. An error that is not the user's is recorded and passes through with its traceback.
    """
    at = Progress()
    try:
        yield at
    except Exception as error:
        if is_out_of_memory(error):
            traceback.clear_frames(
                error.__traceback__
            )  # their tensors; to explain takes memory too
        reason = describe(error, config, at)
        safe = _safe(at.saved)
        if at.phase != "loading" and (safe or not isinstance(error, ProxpoError)):
            told = reason or " ".join(f"{type(error).__name__}: {error}".split())
            kind = type(error.__cause__ or error).__name__
            write_failure(out, reason=told, step=at.step, phase=at.phase, kind=kind)
        if reason is None:
            raise
        late = _only_in_a_new_run(error, config, at) if safe else ""
        ending = f"{late}; {safe}" if safe and at.phase != "loading" else ""
        raise ProxpoError(reason + ending) from error


def describe(error: Exception, config: Config, at: Progress) -> str | None:
    """The line for the user; None for an error that is none of theirs."""
    if is_out_of_memory(error):
        return out_of_memory(error, config, at)
    if isinstance(error, ProxpoError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be written: {error.strerror}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU or of the machine; the CPU's allocator only says so in its message."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def out_of_memory(error: BaseException, config: Config, at: Progress) -> str:
    """Where memory ran out and which settings help there, in order, with their values."""
    where = {"loading": "while loading"}.get(at.phase, f"in the {at.phase} of step {at.step + 1}")
    knobs = [text for name in _HELP.get(at.phase, _HELP["update"]) if (text := _knob(name, config))]
    return f"out of memory {where}{_amount(error)}; what helps, in this order: {', '.join(knobs)}"


def _only_in_a_new_run(error: BaseException, config: Config, at: Progress) -> str:
    """The advice against a lack of memory that a resumed run cannot follow."""
    if not is_out_of_memory(error):
        return ""
    offered = [name for name in _HELP.get(at.phase, _HELP["update"]) if _knob(name, config)]
    fixed = {one.path for one in explain() if one.resume == "fixed"}
    late = [path for name in offered if (path := _PATHS.get(name)) in fixed]
    return f" ({' and '.join(late)} only in a new run)" if late else ""


def _knob(name: str, config: Config) -> str | None:
    """How to turn a setting, or None where it is at its end."""
    model, rollout, train = config.model, config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.samples_per_prompt // train.mini_batches
    if name == "micro_batch":
        now = f"none, that is {rows} rows" if train.micro_batch is None else str(train.micro_batch)
        return None if train.micro_batch == 1 else f"a lower train.micro_batch (now {now})"
    if name == "max_rows":
        default = {"local": 512, "vllm": 256}[rollout.backend]
        now = rollout.options.get("max_rows", default)
        return f"a lower rollout.options.max_rows (now {now})"
    if name == "gradient_checkpointing":
        text = "model.gradient_checkpointing=true (now false)"
        return None if model.gradient_checkpointing else text
    if name == "max_tokens":
        return f"a lower rollout.max_tokens (now {rollout.max_tokens})"
    if name == "dtype":
        wide = model.dtype in ("float32", "float64")
        return f"model.dtype=auto (now {model.dtype})" if wide else None
    return None if model.lora is not None else "model.lora.r=16 (now no adapter)"


def _amount(error: BaseException) -> str:
    found = re.search(r"tried to allocate ([\d.,]+ ?\w+)", str(error), re.I)
    return f" ({found[1]} more wanted)" if found else ""


def _safe(saved: int | None) -> str:
    if saved is None:
        return ""
    return f"checkpoints up to step {saved} are intact, --resume continues from there"


__all__ = ["Progress", "describe", "explained", "is_out_of_memory", "out_of_memory"]
