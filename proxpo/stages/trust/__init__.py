"""Ratios and advantages -> per-token losses that keep the step near the old policy."""

from proxpo.stages.trust.asymmetric import asymmetric_clip
from proxpo.stages.trust.balanced import balanced_clip
from proxpo.stages.trust.clip import clip_cov, hard_clip, ppo_clip, unclipped
from proxpo.stages.trust.divergence import divergence_mask
from proxpo.stages.trust.dynamic import dynamic_clip
from proxpo.stages.trust.ess import ess, ess_cap, two_anchor_ess_cap
from proxpo.stages.trust.mixed import mixed_clip
from proxpo.stages.trust.score import (
    clipped_weight,
    gamma_weight,
    plain_log_ratio,
    score_function,
)
from proxpo.stages.trust.soft import soft_gate

__all__ = [
    "asymmetric_clip",
    "balanced_clip",
    "clip_cov",
    "clipped_weight",
    "divergence_mask",
    "dynamic_clip",
    "ess",
    "ess_cap",
    "gamma_weight",
    "hard_clip",
    "mixed_clip",
    "plain_log_ratio",
    "ppo_clip",
    "score_function",
    "soft_gate",
    "two_anchor_ess_cap",
    "unclipped",
]
