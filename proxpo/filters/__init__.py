"""Which prompts and which tokens take part. A filter shrinks the mask and every denominator.

`prompts` stages decide on whole prompts before the loss (a trainer may resample what they refuse);
`filter` stages take tokens or responses out of the batch; `prune` stages do so once advantages are
known.
"""

from proxpo.filters.difficulty import within_reach
from proxpo.filters.filters import fresh_enough, informative, not_truncated, reject
from proxpo.filters.prune import largest_advantages
from proxpo.filters.steps import noisy_steps
from proxpo.filters.void import has_void, is_void, void_turns

__all__ = [
    "fresh_enough",
    "has_void",
    "informative",
    "is_void",
    "largest_advantages",
    "noisy_steps",
    "not_truncated",
    "reject",
    "void_turns",
    "within_reach",
]
