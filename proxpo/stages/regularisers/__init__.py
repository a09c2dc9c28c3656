"""Per-token penalties added to the policy loss, coefficient included."""

from proxpo.stages.regularisers.consistency import context_consistency
from proxpo.stages.regularisers.convex import kl_convex
from proxpo.stages.regularisers.dual import kl_dual
from proxpo.stages.regularisers.entropy import covariance_penalty, entropy_bonus
from proxpo.stages.regularisers.ess import ess_kl_from_old, ess_kl_full, two_anchor_kl
from proxpo.stages.regularisers.feasible import feasible_share
from proxpo.stages.regularisers.gaussian import gaussian_kl, noise_distance
from proxpo.stages.regularisers.kl import kl_from_old, kl_to_ref
from proxpo.stages.regularisers.latent import latent_kl
from proxpo.stages.regularisers.mirror import mirror_kl

__all__ = [
    "context_consistency",
    "covariance_penalty",
    "entropy_bonus",
    "ess_kl_from_old",
    "ess_kl_full",
    "feasible_share",
    "gaussian_kl",
    "kl_convex",
    "kl_dual",
    "kl_from_old",
    "kl_to_ref",
    "latent_kl",
    "mirror_kl",
    "noise_distance",
    "two_anchor_kl",
]
