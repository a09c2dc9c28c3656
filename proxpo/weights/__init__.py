"""Per-token weights on the policy loss. `select` stages weigh the regularisers too."""

from proxpo.weights.conflict import conflict_tokens
from proxpo.weights.correction import behaviour, off_policy_mask, tis
from proxpo.weights.curvature import curvature_mask
from proxpo.weights.duration import by_duration
from proxpo.weights.gate import entropy_gate
from proxpo.weights.steps import inverse_step
from proxpo.weights.token import probability_reweight, probability_split, top_entropy

__all__ = [
    "behaviour",
    "by_duration",
    "conflict_tokens",
    "curvature_mask",
    "entropy_gate",
    "inverse_step",
    "off_policy_mask",
    "probability_reweight",
    "probability_split",
    "tis",
    "top_entropy",
]
