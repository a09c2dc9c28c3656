"""Preference pairs inside a group: the best and the worst response to a prompt.

`best_and_worst` decides them where groups are whole. `roles` writes the decision to the batch, so
that it survives any cut into micro-batches.
"""

import torch

from proxpo.fields import declare_field
from proxpo.ops.shapes import Int, Tensor
from proxpo.types import Batch

declare_field(
    "pair",
    "seq",
    kind="int",
    doc="1 for the best response to a prompt, -1 for the worst, 0 for the others; set by "
    "aggregate=pairwise_logistic",
)


def best_and_worst(batch: Batch) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """Rows (chosen, rejected), one pair per prompt; prompts whose rewards are all equal give none.

    The first row wins a tie. Responses whose reward is missing are left out, and so is a pair of
    two empty responses.
    """
    rewards = batch.require("rewards", by="pairing responses")
    group = batch.require("group", by="pairing responses")
    prompts, index = group.unique(return_inverse=True)
    scored = ~rewards.isnan()
    best = _first_extreme(rewards, index, scored, len(prompts), largest=True)
    worst = _first_extreme(rewards, index, scored, len(prompts), largest=False)
    filled = batch.mask.any(dim=1)
    top, bottom = best.clamp(min=0), worst.clamp(min=0)
    paired = (best >= 0) & (rewards[top] > rewards[bottom]) & (filled[top] | filled[bottom])
    return best[paired], worst[paired]


def roles(batch: Batch) -> dict[str, Tensor]:
    """Batch fields of the pairs: +1 and -1 in `pair`, and `group` numbered from 0."""
    chosen, rejected = best_and_worst(batch)
    index = batch.group.unique(return_inverse=True)[1]
    pair = torch.zeros_like(index).index_fill(0, chosen, 1).index_fill(0, rejected, -1)
    return {"pair": pair, "group": index}


def _first_extreme(
    rewards: Tensor, index: Tensor, scored: Tensor, groups: int, *, largest: bool
) -> Int[Tensor, " group"]:
    if not len(rewards):
        return index.new_full((groups,), -1)
    sign = 1.0 if largest else -1.0
    value = torch.where(scored, sign * rewards, -torch.inf)
    top = value.new_full((groups,), -torch.inf).scatter_reduce(0, index, value, "amax")
    row = torch.arange(len(rewards), device=rewards.device)
    candidate = torch.where(scored & (value == top[index]), row, len(rewards))
    first = index.new_full((groups,), len(rewards)).scatter_reduce(0, index, candidate, "amin")
    return torch.where(first < len(rewards), first, -1)
