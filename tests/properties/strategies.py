"""Random batches for Hypothesis."""

import torch
from helpers import make_batch
from hypothesis import assume
from hypothesis import strategies as st

from proxpo import Batch


@st.composite
def batches(draw: st.DrawFn, *, least_groups: int = 1) -> Batch:
    """Ragged batches of 1-3 prompts with 1-4 responses, distinct rewards, holes and all fields."""
    seed = draw(st.integers(0, 10**6))
    batch = make_batch(
        seed,
        groups=draw(st.integers(least_groups, 3)),
        size=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 7)),
        spread=draw(st.sampled_from([0.01, 0.2, 0.6])),
        holes=draw(st.booleans()),
    )
    assume(batch.mask.sum() > 1)  # one token cannot be whitened, which is an error of its own
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    return batch.replace(rewards=order.double() / len(order))  # no ties, so no order of rows
