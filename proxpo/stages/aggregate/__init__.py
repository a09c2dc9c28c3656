"""Per-token losses -> one scalar. The divisor decides how much a long response or a prompt weighs.

x_it token loss, m mask, L_i = Σ_t m, N = Σ m, B⁺ non-empty rows, P prompts. All counts are those
of the whole optimizer step (`Denominators`), so micro-batches and ranks add up to one big batch.
Fully masked rows do not count, except where a mode says so. Nothing valid: loss 0, gradient 0.
"""

from proxpo.stages.aggregate.averages import (
    constant_length,
    guarded_token_mean,
    pairwise_logistic,
    prompt_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_sum_token_mean,
    token_mean,
    token_sum,
)
from proxpo.stages.aggregate.labelled import labelled_scores

__all__ = [
    "constant_length",
    "guarded_token_mean",
    "labelled_scores",
    "pairwise_logistic",
    "prompt_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_sum_token_mean",
    "token_mean",
    "token_sum",
]
