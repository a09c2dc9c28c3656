"""The critic's loss, for recipes that train one."""

from proxpo.stages.value.squared import value_loss

__all__ = [
    "value_loss",
]
