"""Reward shaping: rewards -> rewards, before advantages are computed."""

from proxpo.rewards.dither import dither
from proxpo.rewards.novelty import gradient_novelty
from proxpo.rewards.progress import progress_reward
from proxpo.rewards.shaping import clip_reward, kl_in_reward, overlong_penalty
from proxpo.rewards.spans import find_span, span_reward, span_values, token_values
from proxpo.rewards.truncation import fail_truncated
from proxpo.rewards.unscored import usable_only

__all__ = [
    "clip_reward",
    "dither",
    "fail_truncated",
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
