"""Metrics under the names of TRL (which are proxpo's) and of verl, both ways.

Only what both measure alike is renamed; every other metric keeps its name.
"""

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

# Not the same, so not here: `loss` (with penalties) and actor/pg_loss (without), `num_tokens` (of
# the run) and perf/total_num_tokens (of the step), `epoch` (a fraction) and training/epoch (a
# number), `reward` and critic/rewards/mean (after a KL penalty).
TRL_TO_VERL = {
    "reward": "critic/score/mean",
    "policy_loss": "actor/pg_loss",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "step_time": "timing_s/step",
    "step": "training/global_step",
}
VERL_TO_TRL = {verl: trl for trl, verl in TRL_TO_VERL.items()}


def to_verl(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics of a proxpo or TRL run under verl's names."""
    return _renamed(metrics, TRL_TO_VERL)


def to_trl(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics of a verl run under TRL's names."""
    return _renamed(metrics, VERL_TO_TRL)


def _renamed(metrics: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    """A metric that is there under both names keeps them: nothing is overwritten."""
    return {
        names[name] if name in names and names[name] not in metrics else name: value
        for name, value in metrics.items()
    }


__all__ = ["TRL_TO_VERL", "VERL_TO_TRL", "to_trl", "to_verl"]
