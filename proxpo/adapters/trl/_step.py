"""One optimizer step in TRL, and small translations of what TRL hands over."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import split_tensor_dict

from proxpo.adapters.trl._rollout import Window
from proxpo.shapes import Bool, Float, Tensor
from proxpo.types import AllSum, Batch, Recipe

ROW = "proxpo_row"  # travels with each completion: its number in the whole generation batch


@dataclass(kw_only=True)
class Step:
    """The micro-batches of this process that one optimizer step accumulates.

    sums: batch-wide statistics, for the recipe with and without its regularisers
    seen: metrics so far, weighted by tokens
    """

    recipe: Recipe
    window: Window
    inputs: Sequence[dict[str, Any]]
    model: nn.Module
    sums: dict[bool, AllSum] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    done: int = 0


def now(batch: Batch, found: Mapping[str, Tensor]) -> Batch:
    """The batch with the numbers of a forward pass; on fresh data they are the old ones too."""
    if batch.old_logp is None:
        batch = batch.replace(old_logp=found["logp"].detach())
    return batch.replace(**found)


def mask_of(inputs: Mapping[str, Any]) -> Bool[Tensor, "seq tok"]:
    """Tokens to train on: of the completion, and not written by a tool."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def weighted(
    scores: Float[Tensor, "seq function"], weights: Float[Tensor, " function"]
) -> Float[Tensor, " seq"]:
    """One reward per completion: the weighted sum of those given, NaN where none was."""
    unscored = scores.isnan().all(dim=1)
    total = (scores * weights.to(scores)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan)


def in_order(held: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches in the order of generation, so that each holds whole groups."""
    order = torch.cat([one[ROW] for one in held]).argsort()

    def joined(name: str) -> Any:
        values = [one[name] for one in held]
        return torch.cat(values)[order] if values[0].dim() else values[0]

    return split_tensor_dict({name: joined(name) for name in held[0]}, len(held))


__all__ = ["ROW", "Step", "in_order", "mask_of", "now", "weighted"]
