"""A stage's memory of prompts: columns of its state, with a row per prompt met so far.

The rows are sorted by `prompt_id`, and the table grows. Each process remembers the prompts that it
has met.
"""

import torch

from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.types import State


def blank(*columns: str) -> State:
    """A table without rows."""
    empty = {name: torch.zeros(0, dtype=torch.float64) for name in columns}
    return {"prompt_id": torch.zeros(0, dtype=torch.int64), **empty}


def recall(
    state: State, column: str, prompt_id: Int[Tensor, " row"], *, default: float = 0.0
) -> Float[Tensor, " row"]:
    """The column's entry for each prompt, in float64; `default` for new prompts."""
    place, known = find(state["prompt_id"].to(prompt_id.device), prompt_id)
    column_values = state[column].to(prompt_id.device)
    entries = torch.full(prompt_id.shape, default, dtype=torch.float64, device=prompt_id.device)
    entries[known] = column_values[place[known]]
    return entries


def remember(
    state: State, prompt_id: Int[Tensor, " row"], columns: dict[str, Float[Tensor, " row"]]
) -> State:
    """The table with these entries written or added; of a prompt given twice the last one counts.

    Columns not named keep their entries, and are 0 for new prompts.
    """
    updated = prompt_id.cpu()
    prompts = torch.cat([state["prompt_id"], updated]).unique()
    before, _ = find(prompts, state["prompt_id"])
    now, _ = find(prompts, updated)
    table: State = {"prompt_id": prompts}
    for name in state.keys() - {"prompt_id"}:
        table[name] = torch.zeros(len(prompts), dtype=torch.float64)
        table[name][before] = state[name]
        if name in columns:
            table[name][now] = columns[name].double().cpu()
    return table


def find(
    known: Int[Tensor, " n"], wanted: Int[Tensor, "*shape"]
) -> tuple[Int[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Row of each wanted number among the known, sorted ones, and True where it is among them."""
    if not len(known):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
    return place, known[place] == wanted


__all__ = ["blank", "find", "recall", "remember"]
