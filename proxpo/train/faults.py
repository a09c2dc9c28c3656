"""Explains an error that ends a run in one line: phase, settings that help, intact checkpoints."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxpo.errors import ProxpoError
from proxpo.ops.memory import is_out_of_memory
from proxpo.runs.status import write_failure
from proxpo.sampler import SHARE
from proxpo.train.config import Config, explain
from proxpo.train.learning_signal import NoSignalError

# Settings that help against a lack of memory by phase, the most effective and least costly first.
_HELP = {
    "loading": ("memory", "lora", "dtype"),
    "rollout": ("max_rows", "max_tokens", "dtype", "lora"),
    "update": (
        "micro_batch",
        "gradient_checkpointing",
        "max_rows",
        "memory",
        "max_tokens",
        "dtype",
        "lora",
    ),
    "evaluate": ("micro_batch", "max_rows", "memory", "max_tokens", "dtype", "lora"),
}
_PATHS = {"lora": "model.lora", "max_tokens": "rollout.max_tokens", "dtype": "model.dtype"}


@dataclass
class Progress:
    """Phase and step of a run, for the line on where it ended.

    saved: step of the newest intact checkpoint; begun: the files of the run are there
    """

    phase: str = "loading"
    step: int = 0
    saved: int | None = None
    begun: bool = False


@contextlib.contextmanager
def explained(out: Path, config: Config) -> Iterator[Progress]:
    """Raises errors of the block as one line; writes failure.json for a run that has begun.

    A mistake in the input that shows before the run has files is no failed run: it leaves nothing.
    An error that is not the user's is recorded and passes through with its traceback.
    """
    at = Progress()
    try:
        yield at
    except Exception as error:
        if is_out_of_memory(error):
            # Frees the tensors of their frames: explaining takes memory too.
            traceback.clear_frames(error.__traceback__)
        reason = explain_error(error, config, at)
        ends_run = isinstance(error, NoSignalError)  # --resume would end the same way
        safe = "" if ends_run else _safe(at.saved)
        if at.phase != "loading" and (at.begun or not isinstance(error, ProxpoError)):
            line = reason or " ".join(f"{type(error).__name__}: {error}".split())
            kind = type(error.__cause__ or error).__name__
            with contextlib.suppress(OSError):  # a full disk: the line is raised all the same
                write_failure(out, reason=line, step=at.step, phase=at.phase, kind=kind)
        if reason is None or ends_run:
            raise
        late = _only_in_a_new_run(error, config, at) if safe else ""
        ending = f"{late}; {safe}" if safe and at.phase != "loading" else ""
        raise ProxpoError(reason + ending) from error


def explain_error(error: Exception, config: Config, at: Progress) -> str | None:
    """The line for the user; None for an error that is not the user's."""
    if is_out_of_memory(error):
        return out_of_memory(error, config, at)
    if isinstance(error, ProxpoError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be written: {error.strerror}"
    return None


def out_of_memory(error: BaseException, config: Config, at: Progress) -> str:
    """The line on a lack of memory: its phase and the settings that help, with their values."""
    where = {"loading": "while loading"}.get(at.phase, f"in the {at.phase} of step {at.step + 1}")
    knobs = [text for name in _HELP.get(at.phase, _HELP["update"]) if (text := _knob(name, config))]
    return f"out of memory {where}{_amount(error)}; what helps, in this order: {', '.join(knobs)}"


def _only_in_a_new_run(error: BaseException, config: Config, at: Progress) -> str:
    """The settings of that advice which a resumed run cannot change."""
    if not is_out_of_memory(error):
        return ""
    offered = [name for name in _HELP.get(at.phase, _HELP["update"]) if _knob(name, config)]
    fixed = {setting.path for setting in explain() if setting.resume == "fixed"}
    late = [path for name in offered if (path := _PATHS.get(name)) in fixed]
    return f" ({' and '.join(late)} only in a new run)" if late else ""


def _knob(name: str, config: Config) -> str | None:
    """Advice on one setting with its present value; None where it cannot go further."""
    model, rollout, train = config.model, config.rollout, config.train
    rows = rollout.prompts_per_step * rollout.samples_per_prompt // train.mini_batches
    if name == "micro_batch":
        now = f"none, that is {rows} rows" if train.micro_batch is None else str(train.micro_batch)
        text = f"train.micro_batch=auto, or a lower number (now {now})"
        return None if train.micro_batch in (1, "auto") else text
    if name == "max_rows":
        return f"a lower rollout.options.max_rows (now {rollout.options.get('max_rows', 512)})"
    if name == "memory":
        now = rollout.options.get("memory", SHARE)
        text = f"rollout.options.sleep=true, or a lower rollout.options.memory (now {now})"
        return text if rollout.backend == "vllm" and not rollout.options.get("sleep") else None
    if name == "gradient_checkpointing":
        now = "auto" if model.gradient_checkpointing == "auto" else "false"
        text = f"model.gradient_checkpointing=true (now {now})"
        return None if model.gradient_checkpointing is True else text
    if name == "max_tokens":
        return f"a lower rollout.max_tokens (now {rollout.max_tokens})"
    if name == "dtype":
        wide = model.dtype in ("float32", "float64")
        return f"model.dtype=auto (now {model.dtype})" if wide else None
    return None if model.lora is not None else "model.lora.r=16 (now no adapter)"


def _amount(error: BaseException) -> str:
    amount = re.search(r"tried to allocate ([\d.,]+ ?\w+)", str(error), re.I)
    return f" ({amount[1]} more wanted)" if amount else ""


def _safe(saved: int | None) -> str:
    if saved is None:
        return ""
    return f"checkpoints up to step {saved} are intact, --resume continues from there"


__all__ = ["Progress", "explain_error", "explained", "out_of_memory"]
