"""Types of test-time adaptation: an answer, the result of an arm, a method and its two loops."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from proxpo.train.tasks import Problem

Ending = Literal["right", "reward", "turns", "iterations", "budget", "context", "no block"]


class Answer(NamedTuple):
    """Sampled token ids, end token included, their text, and the task's verdict on it."""

    ids: list[int]
    text: str
    right: bool


@dataclass(frozen=True)
class Trial:
    """Result of one arm on one problem.

    attempts: answers given, the first included; tokens: passes of a token through the model, those
    of the first answer included; ended: why there was no further attempt
    """

    answer: Answer
    attempts: int
    tokens: float
    ended: Ending
    updates: list[dict[str, int | float]] = field(default_factory=list)


@runtime_checkable
class Adapter(Protocol):
    """A method at work on one model. `sgd` is its loop with a plain gradient step in its place."""

    def reset(self) -> None:
        """Sets the model back to what it was before any problem."""

    def first(self, problem: Problem) -> Answer:
        """The answer of the model as it is."""

    def reward(self, problem: Problem, answer: Answer) -> float:
        """R in [-1, 0] (below it with a format rule), by which attempts end; 0 is the best."""

    def adapt(self, problem: Problem, first: Answer) -> Trial:
        """Answers by the method."""

    def sgd(self, problem: Problem, first: Answer, limit: float) -> Trial:
        """Answers with plain gradient steps, within `limit` tokens."""


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """A method with its options.

    lora: options of the adapters that its model is loaded with; prepare: changes the loaded model
    before a sampler copies it; start: makes the adapter from a responder; threshold: reward above
    which an answer is taken
    """

    start: Callable[..., Adapter]
    lora: Mapping[str, Any] | None = None
    prepare: Callable[[Any], None] | None = None
    threshold: float = -0.2


UNLIMITED = math.inf

__all__ = ["UNLIMITED", "Adaptation", "Adapter", "Answer", "Ending", "Trial"]
