"""Settings of an adaptation run, from `--set` and keyword arguments."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from proxpo.adapt.latentseek import make_latentseek
from proxpo.adapt.rosa import make_rosa
from proxpo.adapt.types import Adaptation
from proxpo.errors import ProxpoError, nearest, resolve
from proxpo.recipes import method as method_entry
from proxpo.runs.yaml_file import read_yaml
from proxpo.settings import TASK_OPTIONS, contradiction, parse_setting, put
from proxpo.stages._options import bind

CONFIG = "config.yaml"
MOST_TEMPERATURE = 1000
ADAPTATIONS: dict[str, Callable[..., Adaptation]] = {
    "latentseek": make_latentseek,
    "rosa": make_rosa,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run depends on; two runs with equal ones give equal rows on a CPU.

    problems: held-out problems, from number `first` on; temperature: of sampled answers
    dtype: of weights and arithmetic; options: those of the method
    """

    method: str
    model: str = "tiny"
    task: str = "arithmetic"
    problems: int = 50
    first: int = 0
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    max_tokens: int = 8
    temperature: float = 1.0
    task_reward: str | None = None
    correct_above: float | None = None
    task_options: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.problems, self.max_tokens) < 1:
            raise ProxpoError(
                f"adapt: problems and max_tokens are at least 1, got {self.problems} and "
                f"{self.max_tokens}"
            )
        if self.seed < 0:
            raise ProxpoError(f"adapt: seed is at least 0, got {self.seed}")
        if self.first < 0:
            raise ProxpoError(f"adapt: first is a number of a problem from 0 on, got {self.first}")
        if not 0 < self.temperature <= MOST_TEMPERATURE:
            raise ProxpoError(
                f"adapt: temperature is above 0 and at most {MOST_TEMPERATURE:,}, got "
                f"{self.temperature}"
            )
        if self.correct_above is not None and not math.isfinite(self.correct_above):
            raise ProxpoError(f"adapt: task.correct_above is a number, got {self.correct_above}")

    @property
    def folder(self) -> str:
        """Folder of a run that names none."""
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.task)
        return f"runs/{self.method}-{name.strip('-.')}-seed{self.seed}"

    def adaptation(self) -> Adaptation:
        """The method with its options."""
        return ADAPTATIONS[self.method](**self.options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_settings(
    method: str,
    sets: Iterable[str | tuple[str, Any]] = (),
    *,
    stored: Mapping[str, Any] | None = None,
    **common: Any,
) -> Settings:
    """Settings of a run; `sets` are options of the method or of the run, names checked.

    Options of the task are `task.options.NAME`, its reward `task.reward`, `task.correct_above`.
    stored: values that stand where neither `sets` nor `common` gives another
    """
    method = _resolve(method)
    entry = method_entry(method)
    own = entry.defaults
    general = {f.name for f in fields(Settings)} - {"method", "options", "task_options"}
    spelt = {"task.reward": "task_reward", "task.correct_above": "correct_above"}
    flags = {k: v for k, v in common.items() if v is not None}
    values: dict[str, Any] = {**(stored or {}), **flags}
    options: dict[str, Any] = {}
    task_options: dict[str, Any] = {}
    for setting in sets:
        key, value = parse_setting(setting) if isinstance(setting, str) else setting
        key = spelt.get(key, key)
        if key.startswith(TASK_OPTIONS):
            put(task_options, key.removeprefix(TASK_OPTIONS).split("."), value, key)
        elif key in own:
            options[key] = value
        elif key in general:
            if flags.get(key, value) != value:
                raise contradiction(f"--{key} {flags[key]}", key, value)
            values[key] = value
        else:
            known = [*own, *sorted(general - {"task_reward"}), *spelt]
            raise ProxpoError(f"unknown setting '{key}'{nearest(key, known)}")
    made: Mapping[str, Any] = bind(
        Settings, {"method": method, "task_options": {}, "options": {}, **values}, what="adapt"
    )
    chosen = dict(entry.make(**options).options)
    return Settings(**{**made, "task_options": task_options, "options": chosen})


def _resolve(method: str) -> str:
    try:
        return resolve(method, ADAPTATIONS, what="method")
    except ProxpoError as error:
        raise ProxpoError(f"adapt: {error}") from None


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings that a run was started with; None where there is none."""
    path = folder / CONFIG
    return read_yaml(path) if path.exists() else None


def resumed_settings(folder: Path, method: str, sets: Iterable[str], **common: Any) -> Settings:
    """Settings of `--resume`: the run's own, where there is one and no others are given."""
    stored = read_settings(folder) or {"method": _resolve(method)}
    own = [*stored.pop("options", {}).items()]
    own += [(f"{TASK_OPTIONS}{k}", v) for k, v in stored.pop("task_options", {}).items()]
    if _resolve(method) != stored.pop("method", None):
        raise ProxpoError(f"{folder} is a run of another method; --out starts another")
    return load_settings(method, [*own, *sets], stored=stored, **common)


__all__ = ["CONFIG", "Settings", "load_settings", "read_settings", "resumed_settings"]
