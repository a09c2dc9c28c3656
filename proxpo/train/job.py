"""`Job`: a run as the loop sees it, whatever is trained; saving and restoring it.

A domain (language models, control, ...) implements it. `RolloutJob` (rollouts.py) is the part that
all methods share which sample a rollout and train a recipe on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from proxpo.errors import ProxpoError
from proxpo.ops.memory import is_out_of_memory
from proxpo.runs.checkpoint import Checkpoint, save_checkpoint
from proxpo.train.config import Change, Config, as_dict
from proxpo.train.observer import Observer
from proxpo.train.refusals import unused
from proxpo.types import Recipe

Examined = tuple[dict[str, float], list[dict]]  # metrics, and a few answers to show


class StepWatch(NamedTuple):
    """Callbacks of one step.

    observer: work that can be given up reports its progress here, which raises after a stop signal
    enter(phase): names the phase that begins, for the line on where a run ended
    lap(name): ends a timed part of the step
    sample(line): writes a line to samples.jsonl
    """

    observer: Observer
    enter: Callable[[str], None]
    lap: Callable[[str], None]
    sample: Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class Job(ABC):
    """A run and its progress; the loop makes its steps, evaluates it, saves it and sums it up.

    before: the first evaluation; unwritten: metrics of a step that waits for its evaluation
    changes: of settings, on resuming
    """

    config: Config
    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    unwritten: dict[str, float] | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)

    # The loop saves and restores these by itself.
    PROGRESS: ClassVar = ("seconds", "before", "unwritten", "changes")

    @abstractmethod
    def make_step(self, watch: StepWatch) -> dict[str, float]:
        """Makes one step and counts it in `step`; its metrics, "grad_norm" among them.

        An error that the observer raises leaves the job as it was.
        """

    @abstractmethod
    def examine(self, observer: Observer) -> Examined:
        """Evaluates the policy: "eval/reward" and other metrics, and a few answers.

        An answer is a dict with "prompt", "completion" and "answer".
        """

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """State of a checkpoint: nested dicts, lists, numbers and tensors by name."""

    def info(self) -> dict[str, Any]:
        """Plain values of a checkpoint."""
        return {}

    @abstractmethod
    def load(self, parts: dict[str, Any], info: dict[str, Any]) -> None:
        """Takes the state of a checkpoint over; `step` is set already."""

    @abstractmethod
    def result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        """The results in the summary, from the metrics of the first and the last evaluation.

        reward_before, reward_after, accuracy_after, kl (None where there is none), tokens,
        tokens_per_second; with "score", the name of the reward, and "unit", of a token, where they
        have other names.
        """

    @property
    def sampled(self) -> int:
        """Rollouts whose lines are in samples.jsonl."""
        return self.step

    @property
    def fault(self) -> str:
        """Where the last gradient that was not finite came from, in words."""
        return ""

    def model_writer(self, copied: Callable[[Any], Any]) -> Callable[[Path], None] | None:
        """A function that writes the weights to a folder in a form that others can load.

        copied: makes the copy of a tensor that is written, for those that training changes
        """
        return None

    @property
    def state_to_come(self) -> int:
        """Bytes of state that a checkpoint will hold and that the first step makes."""
        return 0

    @property
    def trained_recipe(self) -> Recipe | None:
        """The recipe behind the run's batches; none of a method with updates of its own."""
        return None

    def check(self, observer: Observer) -> None:  # noqa: B027
        """Verifies and reports the parts of a fresh run, before its first evaluation."""

    def remarks(self) -> list[str]:
        """Lines on the run's settings that the config alone does not show."""
        return list(unused(self.config, self.config.make_method()).values())

    def closing_notes(self, rows: list[dict[str, Any]]) -> list[str]:
        """Lines on the run at its end, from the rows of metrics.jsonl."""
        return []

    def figure(self) -> Any | None:
        """A matplotlib figure of what the run has made, beside its curves."""
        return None

    def observe(self, observer: Observer) -> None:  # noqa: B027
        """Takes the observer of the whole run."""

    def close(self) -> None:  # noqa: B027
        """Ends what the job has started."""


def save(job: Job, root: Path) -> Path:
    """Writes a checkpoint from which a run continues bit for bit, with weights others can load."""
    keep, write_model = job.config.checkpoint.keep, job.model_writer(lambda tensor: tensor)
    return save_checkpoint(
        root, job.step, job.parts(), whole_info(job), keep_last=keep, write_model=write_model
    )


def whole_info(job: Job) -> dict[str, Any]:
    """The plain values of a checkpoint: settings, progress and the job's own."""
    progress = {name: getattr(job, name) for name in job.PROGRESS}
    return {"config": as_dict(job.config), **job.info(), **progress}


def restore(job: Job, checkpoint: Checkpoint, changed: Sequence[Change] = ()) -> None:
    """Brings a freshly built job to the state of the checkpoint, or refuses one that does not fit.

    `changed` settings, already in the job's config, are recorded with the step.
    """
    info = checkpoint.info
    try:
        job.step, job.seconds, job.before = checkpoint.step, info["seconds"], info["before"]
        # Checkpoints of earlier versions have neither.
        job.unwritten, job.changes = info.get("unwritten"), list(info.get("changes", ()))
        job.load(checkpoint.parts, info)
        job.changes += [
            {
                "step": checkpoint.step,
                "setting": change.path,
                "before": change.before,
                "after": change.after,
            }
            for change in changed
            if change.path != "out"
        ]
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ProxpoError(
            f"{checkpoint.path} does not fit these settings ({reason}): resume with those the run "
            "was started with, or start another with --out"
        ) from error


__all__ = ["Examined", "Job", "StepWatch", "restore", "save", "whole_info"]
