"""Metrics of an optimizer step from those of its micro-batches: the one place that combines them.

A metric of `policy_loss` is one of four kinds, and the name or the stage says which:

    ..._max      the largest value in the micro-batch: the step has the largest of them
    Stage.adds   a sum over the micro-batch divided by a count of the step: they add up
    statistics   a number of the whole step, made with `ctx.all_sum`: the same in every micro-batch
    the rest     means over the valid tokens of the micro-batch: weighted by its share of them

Statistics are weighted like means, which leaves them as they are.
"""

import functools
from collections.abc import Sequence

import torch

from proxpo.ops.shapes import Tensor
from proxpo.types import Metrics, Recipe

LOSSES = ("loss", "loss/value")  # the policy's with all penalties, and the critic's part of it


def combined(
    recipe: Recipe, totals: Metrics, metrics: Metrics, *, share: float | Tensor
) -> Metrics:
    """`totals` with one more micro-batch, which holds `share` of the step's valid tokens."""
    adds = set(LOSSES).union(*(stage.adds for _, stage in recipe.stages()))
    together = dict(totals)
    for name, value in metrics.items():
        number = value.detach().float()
        part = number if name in adds or is_largest(name) else share * number
        together[name] = joined(name, [totals[name], part]) if name in totals else part
    return together


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """One metric from the parts of a step, each weighted already: micro-batches or processes."""
    return functools.reduce(torch.maximum if is_largest(name) else torch.add, parts)


def is_largest(name: str) -> bool:
    """True if the metric is the largest value of a micro-batch."""
    return name.endswith("_max")


__all__ = ["combined", "joined"]
