"""Types of reward scoring: the function by name, a sample to score, its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Messages = list[dict[str, str]]
Status = Literal["ok", "timeout", "error", "nan"]


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A reward function by name: "package.module:function" or "file.py:function".

    `kwargs` are handed to it with every call. A trusted function is ours, cannot hang, and runs in
    this process; every other one runs in a worker that can be killed. `source` is what verl calls
    data_source, for problems that do not name one themselves. A response is right where the reward
    is above `correct_above`, or, without it, where the function says so ("acc" or "correct").
    """

    where: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = False
    source: str = ""
    correct_above: float | None = None


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One response as decoded text, and what is known about its prompt; plain data only."""

    prompt: str | Messages
    completion: str
    answer: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Outcome:
    """A reward, or NaN with the reason; `correct` where the function tells right from wrong.

    seconds: how long the function took; spans: (start, end, value) of the characters it marked
    feasible: whether the response is allowed at all, where the function says so
    parsed: whether the function found an answer in the response, where it says so
    """

    reward: float
    correct: bool | None = None
    status: Status = "ok"
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)
    spans: tuple[tuple[int, int, float], ...] = ()
    feasible: bool | None = None
    parsed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Values that a function in TRL's signature logged: means by name, columns over the samples."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, list[Any]] = field(default_factory=dict)


__all__ = ["Logged", "Messages", "Outcome", "RewardItem", "RewardSpec", "Status"]
