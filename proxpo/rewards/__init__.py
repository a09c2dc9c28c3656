"""Reward shaping: rewards -> rewards, before advantages are computed."""

from proxpo.rewards.dither import dither
from proxpo.rewards.shaping import clip_reward, kl_in_reward, overlong_penalty
from proxpo.rewards.truncation import fail_truncated

__all__ = [
    "clip_reward",
    "dither",
    "fail_truncated",
    "kl_in_reward",
    "overlong_penalty",
]
