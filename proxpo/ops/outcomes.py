"""Outcome of a response, right or wrong."""

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Bool, Tensor
from proxpo.types import Batch


def solved(batch: Batch, *, by: str) -> Bool[Tensor, " seq"]:
    """True for right responses, from `correct` or from rewards of 1, 0 or -1 (or missing).

    A missing reward counts as wrong: callers leave such responses out.
    """
    if batch.correct is not None:
        return batch.correct
    rewards = batch.require("rewards", by=by)
    odd = ~(rewards.isnan() | (rewards == 1) | (rewards == 0) | (rewards == -1))
    if odd.any():
        row = int(odd.nonzero()[0])
        raise ProxpoError(
            f"{by}: the reward of response {row} is {float(rewards[row]):g}; give right and wrong "
            "as 1 and 0 (or -1), or the batch field 'correct' (in `proxpo train` the reward "
            "function's 'acc', or the setting task.correct_above)"
        )
    return torch.nan_to_num(rewards, nan=0.0) == 1


__all__ = ["solved"]
