"""Per-token penalties added to the policy loss, coefficient included."""

from proxpo.regularisers.entropy import covariance_penalty, entropy_bonus
from proxpo.regularisers.ess import ess_kl_from_old, ess_kl_full, two_anchor_kl
from proxpo.regularisers.kl import kl_from_old, kl_to_ref

__all__ = [
    "covariance_penalty",
    "entropy_bonus",
    "ess_kl_from_old",
    "ess_kl_full",
    "kl_from_old",
    "kl_to_ref",
    "two_anchor_kl",
]
