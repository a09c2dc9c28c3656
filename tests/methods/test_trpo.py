"""Its surrogate; limits of the step are in tests/exact."""

from methods._case import Case
from methods.loops import ratio, seq_mean_token_sum, token_mean, unclipped, z_scores

CASES = {
    "trpo": Case("trpo", {}, lambda b: token_mean(unclipped(ratio(b), z_scores(b)), b)),
    "trpo-sequence": Case(
        "trpo",
        {"average": "sequence"},
        lambda b: seq_mean_token_sum(unclipped(ratio(b), z_scores(b)), b),
    ),
}
