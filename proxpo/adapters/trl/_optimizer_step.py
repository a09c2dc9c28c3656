"""One optimizer step in TRL: its micro-batches, and the counts and sums they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from trl.trainer.utils import (
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from proxpo.adapters.trl._generation_batch import GenerationBatch
from proxpo.adapters.trl._metrics import ClipRecorder
from proxpo.compose import count, tokens_of_group
from proxpo.ops.shapes import Int, Tensor
from proxpo.types import AllSum, Batch, Context, Denominators, Metrics, Reach

ROW = "proxpo_row"  # travels with each completion: its number in the whole generation batch
TRL_ADVANTAGES = "proxpo_trl_advantages"  # and the advantage that TRL has computed


@dataclass(kw_only=True)
class OptimizerStep:
    """The micro-batches of this process that one optimizer step accumulates.

    recorder: the recipe, which records what its clip acts on
    group_tokens: for each row of the whole rollout, the step's tokens in its group
    ctx: the recipe's memory, the clock, the step's counts and sums over all processes
    tokens: trained tokens of the step, of all processes
    policy_sum: sums for the policy term alone, under a gradient transform
    metrics: of the micro-batches so far, as proxpo.ops.metering combines them
    """

    recorder: ClipRecorder
    rollout: GenerationBatch
    inputs: Sequence[dict[str, Any]]
    group_tokens: Int[Tensor, " seq"]
    ctx: Context
    tokens: Int[Tensor, ""]
    policy_sum: AllSum | None = None
    metrics: Metrics = field(default_factory=dict)
    done: int = 0

    def microbatch(self, inputs: dict[str, Any]) -> Batch:
        """Rows of the rollout that are in a micro-batch of TRL's."""
        rows = inputs[ROW]
        batch = self.rollout.local.rows(rows - self.rollout.first)
        return batch.replace(group_tokens=self.group_tokens[rows])


def counts_of_step(
    rollout: GenerationBatch, rows: Int[Tensor, " row"], *, share: float | None = None
) -> tuple[Denominators, Int[Tensor, " seq"]]:
    """Counts of an optimizer step on these rows of all processes, and each row's group tokens.

    As in TRL, a completion that it has masked whole counts in the mean over completions; one that
    a filter of the recipe empties does not.

    share: part of the rollout's tokens that counts as the step's; None: those of its rows
    """
    step = rollout.whole.rows(rows)
    tokens = torch.zeros(len(rollout.whole.mask), dtype=torch.long, device=rows.device)
    counts = count(step)
    counts = replace(counts, sequences=counts.sequences + rollout.blank[rows].sum())
    if share is not None:
        counts = replace(counts, tokens=share * rollout.whole.mask.sum().to(counts.tokens))
    return counts, tokens.index_copy(0, rows, tokens_of_group(step))


def groups_over_processes(ranks: AllSum) -> AllSum:
    """The sum over processes also for sums over groups, which TRL has spread over processes."""

    def all_sum(x: Tensor, scope: Reach = "batch") -> Tensor:
        return ranks(x, "batch" if scope == "rank" else scope)

    return all_sum


def in_generation_order(inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches of a rollout without TRL's shuffle, so that each holds whole groups."""
    parts = [split_pixel_values_by_grid(part) for part in inputs]  # images: a list, by completion
    order = torch.cat([part[ROW] for part in parts]).argsort()

    def joined(name: str) -> Any:
        values = [part[name] for part in parts]
        if isinstance(values[0], list):
            flat = list(chain.from_iterable(values))
            return [flat[row] for row in order]
        return torch.cat(values)[order] if values[0].dim() else values[0]

    ordered = split_tensor_dict({name: joined(name) for name in parts[0]}, len(parts))
    return [unsplit_pixel_values_by_grid(part) for part in ordered]


__all__ = [
    "ROW",
    "TRL_ADVANTAGES",
    "OptimizerStep",
    "counts_of_step",
    "groups_over_processes",
    "in_generation_order",
]
