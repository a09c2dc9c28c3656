"""Losses of the critic."""

from proxpo.stages.value.squared import value_loss

__all__ = [
    "value_loss",
]
