"""One ratio per turn of an agent, given to each of the turn's tokens."""

from typing import Literal

import torch

from proxpo.ops.shapes import Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.ratio.token import bounded_exp, check_limit
from proxpo.types import Batch, Context, PerToken

Split = Literal["turn", "mask"]


def turn_index(batch: Batch, split: Split) -> Int[Tensor, "seq tok"]:
    """Number of each token's turn, from 0; masked tokens may have any.

    split="turn" reads the field; "mask" counts maximal runs of valid tokens.
    """
    if split == "mask":
        starts = batch.mask.clone()
        starts[:, 1:] &= ~batch.mask[:, :-1]
        return (starts.cumsum(1) - 1).clamp(min=0)
    number = torch.where(batch.mask, batch.turn, 0)
    low, high = torch.stack(number.aminmax()).tolist() if number.numel() else (0, 0)
    if high - low < number.shape[-1]:
        return number - low if low else number
    return number.unique(return_inverse=True)[1]  # sorts all tokens: for odd numbers only


@stage("ratio", gives="ratio")
def turn(*, split: Split = "turn", limit: float = 20.0):
    """w_k = exp((1/|y^k|) Σ_{t∈k} (log π - log π_old)), GSPO's within a turn. arXiv:2511.20718.

    Turns come from the batch field `turn`, or are the maximal runs of valid tokens (split="mask").
    The exponent is held within ±limit.

    split: a turn: by the field "turn", or a run of valid tokens ("mask")
    limit: bound on the log-ratio, in either direction
    """
    check_limit(limit, stage="turn")

    def ratio(batch: Batch, ctx: Context) -> PerToken:
        index = turn_index(batch, split)
        d = torch.where(batch.mask, batch.logp - batch.old_logp.detach(), 0.0)
        turns = int(index.max()) + 1 if index.numel() else 1
        blank = d.new_zeros(len(d), turns)
        length = blank.scatter_add(1, index, batch.mask.to(d.dtype)).clamp(min=1)
        exponent = (blank.scatter_add(1, index, d) / length).gather(1, index)
        return bounded_exp(exponent, limit), {}

    return Parts(apply=ratio, needs=("old_logp", "turn") if split == "turn" else ("old_logp",))
