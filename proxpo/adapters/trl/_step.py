"""One optimizer step in TRL: its micro-batches, and what the current weights say of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import split_tensor_dict

from proxpo.adapters.trl._rollout import Window
from proxpo.logp import model_logp
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.types import AllSum, Batch, Metrics, Reach, Recipe

ROW = "proxpo_row"  # travels with each completion: its number in the whole generation batch


@dataclass(kw_only=True)
class Step:
    """The micro-batches of this process that one optimizer step accumulates.

    sums: batch-wide statistics, for the recipe with and without its regularisers
    seen: metrics so far, as proxpo.ops.metering combines them
    """

    recipe: Recipe
    window: Window
    inputs: Sequence[dict[str, Any]]
    model: nn.Module
    sums: dict[bool, AllSum] = field(default_factory=dict)
    seen: Metrics = field(default_factory=dict)
    done: int = 0


def now(batch: Batch, found: Mapping[str, Tensor]) -> Batch:
    """The batch with the numbers of a forward pass; on fresh data they are the old ones too."""
    if batch.old_logp is None:
        batch = batch.replace(old_logp=found["logp"].detach())
    return batch.replace(**found)


def in_all_groups(ranks: AllSum) -> AllSum:
    """Sums over groups that TRL has spread over processes: of all processes, not of this one."""

    def all_sum(x: Tensor, scope: Reach = "batch") -> Tensor:
        return ranks(x, "batch" if scope == "rank" else scope)

    return all_sum


def asks_for_sums(run: Callable[..., Any], step: Step, *, apart: bool) -> bool:
    """True if a loss takes sums over the batch, found by running it on a first piece.

    apart: the responses to a prompt lie in different pieces, so that sums over groups count too.
    """
    asked: list[bool] = []

    def probe(x: Tensor, scope: Reach = "batch") -> Tensor:
        asked.append(scope == "batch" or (apart and scope == "rank"))
        return x

    first = step.window.part(step.inputs[0][ROW])
    with torch.no_grad():
        run(now(first, {"logp": first.logp, "entropy": first.logp}), all_sum=probe)
    return any(asked)


def scored(
    model: nn.Module,
    ids: Int[Tensor, "seq all"],
    attended: Int[Tensor, "seq all"],
    tokens: int,
    *,
    rows: int | None,
    temperature: float,
    entropy: bool,
) -> tuple[Float[Tensor, "seq tok"], Float[Tensor, "seq tok"] | None]:
    """Log-probabilities of the last tokens, a few rows at a time, and entropies if asked for."""
    parts: list[Any] = []
    for some in torch.arange(len(ids)).split(rows or len(ids)):
        mask = attended[some, -tokens:].bool()
        given: dict[str, Any] = {"attention_mask": attended[some], "entropy": entropy}
        found: Any = model_logp(model, ids[some], mask, temperature=temperature, **given)
        parts.append(found if entropy else (found,))
    logp, *more = (torch.cat(columns) for columns in zip(*parts))
    return logp, more[0] if entropy else None


def in_order(held: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches in the order of generation, so that each holds whole groups."""
    order = torch.cat([one[ROW] for one in held]).argsort()

    def joined(name: str) -> Any:
        values = [one[name] for one in held]
        return torch.cat(values)[order] if values[0].dim() else values[0]

    return split_tensor_dict({name: joined(name) for name in held[0]}, len(held))


__all__ = ["ROW", "Step", "asks_for_sums", "in_all_groups", "in_order", "now", "scored"]
