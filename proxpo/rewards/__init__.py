"""Reward shaping: rewards -> rewards, before advantages are computed."""

from proxpo.rewards.shaping import clip_reward, kl_in_reward, overlong_penalty

__all__ = ["clip_reward", "kl_in_reward", "overlong_penalty"]
