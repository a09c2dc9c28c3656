"""Reward shaping: rewards -> rewards, before advantages are computed."""

from proxpo.stages.reward.dither import dither
from proxpo.stages.reward.episode import episode_targets
from proxpo.stages.reward.feasible import feasible_only
from proxpo.stages.reward.novelty import gradient_novelty
from proxpo.stages.reward.progress import progress_reward
from proxpo.stages.reward.shaping import clip_reward, kl_in_reward, overlong_penalty
from proxpo.stages.reward.spans import find_span, span_reward, span_values, token_values
from proxpo.stages.reward.truncation import fail_truncated
from proxpo.stages.reward.unscored import usable_only

__all__ = [
    "clip_reward",
    "dither",
    "episode_targets",
    "fail_truncated",
    "feasible_only",
    "find_span",
    "gradient_novelty",
    "kl_in_reward",
    "overlong_penalty",
    "progress_reward",
    "span_reward",
    "span_values",
    "token_values",
    "usable_only",
]
