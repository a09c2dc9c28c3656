"""Per-token losses -> one scalar."""

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
