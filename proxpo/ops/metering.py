"""Metrics of an optimizer step from those of its micro-batches: the one place that combines them.

A metric of `policy_loss` is one of four kinds, and the name or the stage says which:

    ..._max      the largest value in the micro-batch: the step has the largest of them
    Stage.adds   a sum over the micro-batch divided by a count of the step: they add up
    statistics   a number of the whole step, made with `ctx.all_sum`: the same in every micro-batch
    the rest     means over the valid tokens of the micro-batch: weighted by its share of them

Statistics are weighted like means, which leaves them as they are.

The second stage of a recipe that returns a metric of the same name has it as `name.2`. What the
memory of a stage reads has a name of its own besides, `memory/PLACE/name`, which is not logged.
"""

import functools
import itertools
import re
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import torch

from proxpo.ops.shapes import Float, Num, Tensor
from proxpo.types import MEMORY, Metrics, Recipe

Value = TypeVar("Value")

LOSSES = ("loss", "loss/value")  # the policy's with all penalties, and the critic's part of it


def combined(
    recipe: Recipe, totals: Metrics, metrics: Metrics, *, share: float | Tensor
) -> Metrics:
    """`totals` with one more micro-batch, which holds `share` of the step's valid tokens."""
    adds = set(LOSSES).union(*(stage.adds for _, stage in recipe.stages()))
    together = dict(totals)
    for name, value in metrics.items():
        number = value.detach().float()
        part = number if returned_name(name) in adds or is_largest(name) else share * number
        together[name] = joined(name, [totals[name], part]) if name in totals else part
    return together


def share_of_step(
    tokens: Num[Tensor, ""], total: Num[Tensor, ""], *, parts: int
) -> Float[Tensor, ""]:
    """A micro-batch's share of the valid tokens of a step; an equal one of a step without any."""
    return torch.where(total > 0, tokens / total.clamp(min=1), 1 / parts)


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """One metric from the parts of a step, each weighted already: micro-batches or processes."""
    return functools.reduce(torch.maximum if is_largest(name) else torch.add, parts)


def is_largest(name: str) -> bool:
    """True if the metric is the largest value of a micro-batch."""
    return returned_name(name).endswith("_max")


def free_name(name: str, taken: Container[str]) -> str:
    """The name, with the number of the stage behind it where others have taken it."""
    numbers = itertools.count(2)
    free = name
    while free in taken:
        free = f"{name}.{next(numbers)}"
    return free


def returned_name(name: str) -> str:
    """The name of a metric as its stage returned it: `filter/rejected` of `filter/rejected.2`."""
    return re.sub(rf"^{MEMORY}[^/]+/|\.\d+$", "", name)


def logged(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """The metrics that a host shows: all but those that only memory reads."""
    return {name: value for name, value in metrics.items() if not name.startswith(MEMORY)}


__all__ = ["combined", "free_name", "joined", "logged", "share_of_step"]
