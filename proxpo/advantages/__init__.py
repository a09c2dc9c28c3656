"""Rewards -> advantages."""

from proxpo.advantages.entropy import entropy_modulated, entropy_penalised
from proxpo.advantages.group_relative import (
    group_process,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
)
from proxpo.advantages.labels import signed_labels
from proxpo.advantages.returns import (
    discounted_return,
    gae,
    greedy_baseline,
    raw_gae,
    rollout_values,
    token_rewards,
    whiten,
)
from proxpo.advantages.reweighted import reweighted_baseline
from proxpo.advantages.visits import smooth_standardised

__all__ = [
    "discounted_return",
    "entropy_modulated",
    "entropy_penalised",
    "gae",
    "greedy_baseline",
    "group_process",
    "group_relative",
    "leave_one_out",
    "length_weighted_baseline",
    "raw_gae",
    "reweighted_baseline",
    "rollout_values",
    "signed_labels",
    "smooth_standardised",
    "token_rewards",
    "whiten",
]
