"""Random batches for Hypothesis.

Hypothesis draws a description and the test builds the batch from it: the run-time type checks use
the `random` module, which a strategy must not.
"""

from dataclasses import dataclass

import torch
from helpers import make_batch
from hypothesis import assume
from hypothesis import strategies as st

from proxpo import Batch


@dataclass(frozen=True)
class Spec:
    """1-3 prompts with 1-4 responses each, ragged, with or without holes."""

    seed: int
    groups: int
    size: int
    tokens: int
    spread: float
    holes: bool

    def batch(self) -> Batch:
        """All fields, and distinct rewards, so that no choice depends on the order of rows."""
        batch = make_batch(**vars(self))
        assume(batch.mask.sum() > 1)  # one token cannot be whitened, which is an error of its own
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(batch.mask), generator=generator).double()
        return batch.replace(rewards=order / len(order))


specs = st.builds(
    Spec,
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
    tokens=st.integers(1, 7),
    spread=st.sampled_from([0.01, 0.2, 0.6]),
    holes=st.booleans(),
)
