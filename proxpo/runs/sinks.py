"""Sinks of metrics: `metrics.jsonl` always, TensorBoard, trackio and wandb on request.

Names are TRL's where TRL has one, so that plots made for its runs work; ours begin with proxpo/.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from proxpo.errors import ProxpoError, imported, resolve
from proxpo.runs.jsonlines import METRICS, JsonLines, OnNotice, as_number

# Names that TRL's GRPOTrainer logs; a trailing / stands for a whole family.
TRL_NAMES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "num_tokens",
    "reward",
    "reward_std",
    "rewards/",
    "frac_reward_zero_std",
    "completions/",
    "entropy",
    "kl",
    "clip_ratio/",
    "sampling/",
    "step_time",
)
# Our names of metrics that TRL has under another name.
RENAMED = {
    "trust/clipped": "clip_ratio/region_mean",
    "kl/ref": "kl",
}
PLAIN = ("step", "time")
SINKS = ("tensorboard", "trackio", "wandb")


@runtime_checkable
class Sink(Protocol):
    """Takes the metrics of one step."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def public_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics under the names they are logged under."""
    named: dict[str, str] = {}
    for name in metrics:
        other = named.setdefault(public_name(name), name)
        if other != name:
            raise ValueError(f"'{other}' and '{name}' are both logged as '{public_name(name)}'")
    return {public: metrics[name] for public, name in named.items()}


def public_name(name: str) -> str:
    """TRL's name for a metric where it has one, else the name under proxpo/."""
    name = RENAMED.get(name, name)
    known = name in TRL_NAMES or f"{name.split('/')[0]}/" in TRL_NAMES
    return name if known or name in PLAIN or name.startswith("proxpo/") else f"proxpo/{name}"


class TensorBoard:
    """Writes event files to a folder of the run; after a resume, repeated steps are purged."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        module = imported("torch.utils.tensorboard", _not_installed("tensorboard"))
        purge = None if resume_at is None else resume_at + 1
        self._writer = module.SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if as_number(value) is not None:
                self._writer.add_scalar(name, as_number(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Writes to trackio or wandb, which share `init`, `log` and `finish`."""

    def __init__(self, package: str, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._module = imported(package, _not_installed(package))
        self._run = self._module.init(project=project, name=name, config=dict(config))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: as_number(value) for name, value in metrics.items()}
        self._module.log({k: v for k, v in numbers.items() if v is not None}, step=step)

    def close(self) -> None:
        self._module.finish()


class Sinks:
    """Several sinks as one; names are made public here, once."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the metrics and returns them under their public names."""
        named = public_names(metrics)
        for sink in self.sinks:
            sink.write(step, named)
        return named

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_sinks(
    run: Path,
    names: Sequence[str] = (),
    *,
    resume_at: int | None = None,
    project: str = "proxpo",
    config: Mapping[str, Any] | None = None,
    on_notice: OnNotice = lambda line: None,
) -> Sinks:
    """metrics.jsonl in the run's folder, and the sinks with these names."""
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(run / "tensorboard", resume_at=resume_at),
        "trackio": lambda: Tracker("trackio", project=project, name=run.name, config=config or {}),
        "wandb": lambda: Tracker("wandb", project=project, name=run.name, config=config or {}),
    }
    chosen = [resolve(name, makers, what="sink") for name in names]
    return Sinks(
        [
            JsonLines(run / METRICS, resume_at=resume_at, each_step=True, on_notice=on_notice),
            *(makers[n]() for n in chosen),
        ]
    )


def check_sinks(names: Sequence[str]) -> None:
    """Refuses sinks whose package is not installed, without importing it."""
    for name in names:
        package = resolve(name, SINKS, what="sink of log.sinks")
        loaded = package in sys.modules
        if (sys.modules[package] if loaded else importlib.util.find_spec(package)) is None:
            raise ProxpoError(_not_installed(package))


def _not_installed(package: str) -> str:
    return f"log.sinks: '{package}' is not installed: pip install {package}"


__all__ = [
    "SINKS",
    "Sink",
    "Sinks",
    "TensorBoard",
    "Tracker",
    "check_sinks",
    "make_sinks",
    "public_names",
]
