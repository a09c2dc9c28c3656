"""Rewards: answers checked by rule, and user functions in worker processes that can be killed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxpo.train.rewards.pool import Outcome, RewardItem, RewardPool, tally

_POOL = ("Outcome", "RewardItem", "RewardPool", "tally")


def __getattr__(name: str) -> Any:
    # Workers import `rewards.answers` through this package and must not pay for the pool.
    if name in _POOL:
        return getattr(importlib.import_module("proxpo.train.rewards.pool"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["Outcome", "RewardItem", "RewardPool", "tally"]
