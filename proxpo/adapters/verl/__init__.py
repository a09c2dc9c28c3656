"""Adapter to verl: every recipe as a loss mode, its group logic as an advantage estimator.

    actor_rollout_ref.actor.policy_loss.loss_mode=proxpo_p3o
    algorithm.adv_estimator=proxpo_p3o

`pip install proxpo` is enough: verl loads `plugin.py` through the entry point group `verl.plugins`
in the driver and in every Ray worker. Options of a recipe, and any swap of its stages:

    actor_rollout_ref.actor.policy_loss._target_=proxpo.adapters.verl.LossConfig
    +actor_rollout_ref.actor.policy_loss.options.ess_scope=microbatch
    +algorithm.options.eps=1e-4

ISOPO and other gradient transforms need proxpo's engine: VERL_ENGINE_VENDOR=proxpo and
actor_rollout_ref.actor.strategy=fsdp2. A method has its own average beside verl's default
actor.loss_agg_mode; a value that is written decides.
"""

import importlib
from typing import Any

_MODULES = {"LossConfig": "config", "ProxpoEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["LossConfig", "ProxpoEngine"]
