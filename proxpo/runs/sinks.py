"""Where metrics go: `metrics.jsonl` always, TensorBoard, trackio and wandb when asked for.

Names are TRL's where TRL has one, so that plots made for its runs work; ours begin with proxpo/.
"""

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from proxpo.errors import ProxpoError, resolve
from proxpo.runs.files import write_whole

# What TRL's GRPOTrainer logs under these names; a trailing / stands for a whole family.
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
# Names of ours for what TRL calls otherwise.
RENAMED = {
    "trust/clipped": "clip_ratio/region_mean",
    "kl/ref": "kl",
}
PLAIN = ("step", "time")
Noted = Callable[[str], None]


@runtime_checkable
class Sink(Protocol):
    """Takes the metrics of one step."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def public_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics under the names they are logged by."""
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


def as_number(value: Any) -> int | float | None:
    """A plain number; None (null in JSON) for NaN and infinities, which JSON does not have."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a metric is a number, got {type(value).__name__}")
    return value if math.isfinite(value) else None


class JsonLines:
    """One flushed line of JSON per row; those after step `resume_at` are cut off on resuming.

    each_step: there is one row for every step from 0 on, so that a gap is worth a line.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_at: int | None = None,
        each_step: bool = False,
        noted: Noted = lambda line: None,
    ) -> None:
        self.path = Path(path)
        with self._clear_errors():
            kept = _kept(self.path, -1 if resume_at is None else resume_at, each_step, noted)
            write_whole(self.path, kept)
            # Unbuffered: a line that could not be written must not be tried again on closing.
            self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.append({"step": step} | {name: as_number(value) for name, value in metrics.items()})

    def append(self, row: Mapping[str, Any]) -> None:
        """Write any row; values JSON does not know become text."""
        line = json.dumps(row, default=str).encode() + b"\n"
        with self._clear_errors():
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ProxpoError(f"{self.path} cannot be written: {error.strerror}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; what is no row with a step is passed over."""
    rows = (_row(line) for line in path.read_bytes().splitlines())
    return [row for row in rows if row is not None]


def missing_steps(rows: Iterable[Mapping[str, Any]], last: int) -> str:
    """The steps from 0 to `last` without a row, as `2-4, 7`; empty where all are there."""
    present = {row["step"] for row in rows}
    missing = [step for step in range(last + 1) if step not in present]
    starts = [step for step in missing if step - 1 in present or step == 0]
    ends = [step for step in missing if step + 1 in present or step == last]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def _kept(path: Path, resume_at: int, each_step: bool, noted: Noted) -> bytes:
    """The whole lines up to and including step `resume_at`; lost ones are told.

    A kill may leave the last line half-written: it is no loss where its step comes again.
    """
    if resume_at < 0:
        return b""
    if not path.exists():
        noted(f"{path} is missing: the new one begins after step {resume_at}")
        return b""
    lines = path.read_bytes().splitlines()
    rows = [_row(line) for line in lines]
    damaged = sum(row is None for row in rows[:-1])
    if damaged:
        noted(f"{path}: {damaged} damaged line{'s' * (damaged > 1)} left out")
    kept = {n: row for n, row in enumerate(rows) if row is not None and row["step"] <= resume_at}
    if each_step:
        kept = _one_a_step(kept, path, noted)
        if gap := missing_steps(kept.values(), resume_at):
            noted(f"{path} has no row of step {gap}: these numbers are lost, reports show the gap")
    return b"".join(lines[number] + b"\n" for number in kept)


def _one_a_step(kept: dict[int, dict[str, Any]], path: Path, noted: Noted) -> dict[int, dict]:
    """The last row of every step, in order of steps."""
    latest = {row["step"]: number for number, row in kept.items()}
    ordered = [latest[step] for step in sorted(latest)]
    if ordered != list(kept):
        noted(f"{path}: steps stood twice or out of order; the last row of each step is kept")
    return {number: kept[number] for number in ordered}


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if whole else None


class TensorBoard:
    """Event files in a folder of the run; after a resume, steps that come again are purged."""

    def __init__(self, folder: Path, *, resume_at: int | None = None) -> None:
        module = _package("torch.utils.tensorboard", "tensorboard")
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
    """trackio or wandb, which share `init`, `log` and `finish`."""

    def __init__(self, package: str, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._module = _package(package, package)
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
        """Write the metrics and return them under their public names."""
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
    noted: Noted = lambda line: None,
) -> Sinks:
    """metrics.jsonl in the run's folder, and the sinks asked for by name."""
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(run / "tensorboard", resume_at=resume_at),
        "trackio": lambda: Tracker("trackio", project=project, name=run.name, config=config or {}),
        "wandb": lambda: Tracker("wandb", project=project, name=run.name, config=config or {}),
    }
    chosen = [resolve(name, makers, what="sink") for name in names]
    return Sinks(
        [
            JsonLines(run / "metrics.jsonl", resume_at=resume_at, each_step=True, noted=noted),
            *(makers[n]() for n in chosen),
        ]
    )


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ProxpoError(
            f"log.sinks: '{package}' is not installed: pip install {package}"
        ) from None


__all__ = [
    "JsonLines",
    "Sink",
    "Sinks",
    "TensorBoard",
    "Tracker",
    "make_sinks",
    "missing_steps",
    "public_names",
    "read_rows",
]
