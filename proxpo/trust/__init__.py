"""Ratios and advantages -> per-token losses that keep the step near the old policy."""

from proxpo.trust.clip import clip_cov, ppo_clip, unclipped
from proxpo.trust.ess import ess, ess_cap, two_anchor_ess_cap
from proxpo.trust.score import clipped_weight, log_ratio, score_function
from proxpo.trust.soft import soft_gate

__all__ = [
    "clip_cov",
    "clipped_weight",
    "ess",
    "ess_cap",
    "log_ratio",
    "ppo_clip",
    "score_function",
    "soft_gate",
    "two_anchor_ess_cap",
    "unclipped",
]
