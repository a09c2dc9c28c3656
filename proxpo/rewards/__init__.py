"""Reward functions: answers checked by rule, and user functions in workers that can be killed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxpo.rewards._calls import tally
    from proxpo.rewards._types import Logged, Outcome, RewardItem, RewardSpec
    from proxpo.rewards.pool import RewardPool

_MODULES = {
    "Logged": "_types",
    "Outcome": "_types",
    "RewardItem": "_types",
    "RewardPool": "pool",
    "RewardSpec": "_types",
    "tally": "_calls",
}


def __getattr__(name: str) -> Any:
    # Workers import `rewards.answers` through this package and must not pay for the pool.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["Logged", "Outcome", "RewardItem", "RewardPool", "RewardSpec", "tally"]
