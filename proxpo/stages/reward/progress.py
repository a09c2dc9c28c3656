"""Partial credit for programs that fail, by the milestones they reach."""

import re
from collections.abc import Sequence

# One line each that an instrumented program prints on its way. The wording is our choice.
MILESTONES = (
    r"import(s|ed|ing)? (done|ok|complete)",
    r"(data|dataset) (is )?loaded",
    r"(data|features?) (is |are )?(prepared|processed|built)",
    r"model (is )?(built|created|defined)",
    r"(training|model) (is )?(finished|done|complete|trained)",
    r"predictions? (is |are )?(made|done|generated)",
    r"submission (is )?(written|saved)",
)


def progress_reward(
    output: str,
    *,
    score: float | None = None,
    milestones: Sequence[str] = MILESTONES,
    per_hit: float = 0.1,
    failure: float = -10.0,
) -> float:
    """r = the grader's score of a valid submission; failure + per_hit·hits without one.

    hits counts the milestones (regular expressions, case ignored) found in the program's output,
    each once. The progress lines must be put into the program by a frozen model: one that is
    trained on this reward learns to print. How both scales combine is our reading.
    arXiv:2509.01684.
    """
    if score is not None:
        return score
    hits = sum(re.search(line, output, re.IGNORECASE) is not None for line in milestones)
    return failure + per_hit * hits


__all__ = ["MILESTONES", "progress_reward"]
