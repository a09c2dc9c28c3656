"""Per-token weights on the policy loss. `select` stages weigh the regularisers too."""

from proxpo.stages.weights.conflict import conflict_tokens
from proxpo.stages.weights.correction import behaviour, off_policy_mask, tis
from proxpo.stages.weights.denoising import inverse_step
from proxpo.stages.weights.duration import by_duration
from proxpo.stages.weights.gate import entropy_gate
from proxpo.stages.weights.summary import separate_means
from proxpo.stages.weights.token import constant, probability_reweight, top_entropy

__all__ = [
    "behaviour",
    "by_duration",
    "conflict_tokens",
    "constant",
    "entropy_gate",
    "inverse_step",
    "off_policy_mask",
    "probability_reweight",
    "separate_means",
    "tis",
    "top_entropy",
]
