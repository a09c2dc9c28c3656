"""Rewards: answers checked by rule, and user functions in worker processes that can be killed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxpo.train.rewards.pool import Logged, Outcome, RewardItem, RewardPool, tally

_POOL = ("Logged", "Outcome", "RewardItem", "RewardPool", "tally")


def __getattr__(name: str) -> Any:
    # Workers import `rewards.answers` through this package and must not pay for the pool.
    if name in _POOL:
        return getattr(importlib.import_module("proxpo.train.rewards.pool"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["Logged", "Outcome", "RewardItem", "RewardPool", "tally"]
