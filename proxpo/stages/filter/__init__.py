"""Which prompts and which tokens take part. A filter shrinks the mask and every denominator.

`prompts` stages decide on whole prompts before the loss (a trainer may resample what they refuse);
`filter` stages take tokens or responses out of the batch; `prune` stages do so once advantages are
known.
"""

from proxpo.stages.filter.filters import fresh_enough, informative, not_truncated, reject
from proxpo.stages.filter.steps import noisy_steps

__all__ = [
    "fresh_enough",
    "informative",
    "noisy_steps",
    "not_truncated",
    "reject",
]
