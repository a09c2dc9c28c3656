"""Exact references for small models: natural policy gradient, MinSR, TRPO.

Slow and plain on purpose: tests hold the fast transforms against them, and on a model of a few
thousand parameters they give the exact step to compare with.
"""

from proxpo.exact.minsr import minsr, minsr_damping, minsr_weights
from proxpo.exact.npg import (
    fisher_exact,
    fisher_sequence,
    fisher_token,
    kl_step,
    mean_kl,
    natural_gradient,
    natural_gradient_batch,
    policy_gradient,
)
from proxpo.exact.policy import (
    ActionBatch,
    FlatPolicy,
    Linearised,
    linearise,
    scores,
    token_scores,
)
from proxpo.exact.trpo import TrpoStep, conjugate_gradient, fisher_product, trpo_step

__all__ = [
    "ActionBatch",
    "FlatPolicy",
    "Linearised",
    "TrpoStep",
    "conjugate_gradient",
    "fisher_exact",
    "fisher_product",
    "fisher_sequence",
    "fisher_token",
    "kl_step",
    "linearise",
    "mean_kl",
    "minsr",
    "minsr_damping",
    "minsr_weights",
    "natural_gradient",
    "natural_gradient_batch",
    "policy_gradient",
    "scores",
    "token_scores",
    "trpo_step",
]
