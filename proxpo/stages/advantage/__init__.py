"""Rewards -> advantages."""

from proxpo.stages.advantage.attempts import attempts, cross_episode_returns
from proxpo.stages.advantage.entropy import entropy_modulated, entropy_penalised
from proxpo.stages.advantage.episode import episode_gae, raw_episode_gae
from proxpo.stages.advantage.group_relative import (
    group_process,
    group_relative,
    leave_one_out,
    length_weighted_baseline,
)
from proxpo.stages.advantage.labels import signed_labels
from proxpo.stages.advantage.returns import (
    discounted_return,
    gae,
    greedy_baseline,
    raw_gae,
    rollout_values,
    token_rewards,
    whiten,
)
from proxpo.stages.advantage.reweighted import reweighted_baseline
from proxpo.stages.advantage.visits import smooth_standardised

__all__ = [
    "attempts",
    "cross_episode_returns",
    "discounted_return",
    "entropy_modulated",
    "entropy_penalised",
    "episode_gae",
    "gae",
    "greedy_baseline",
    "group_process",
    "group_relative",
    "leave_one_out",
    "length_weighted_baseline",
    "raw_episode_gae",
    "raw_gae",
    "reweighted_baseline",
    "rollout_values",
    "signed_labels",
    "smooth_standardised",
    "token_rewards",
    "whiten",
]
