"""Responses of one visit, arranged by prompt."""

from typing import NamedTuple

import torch

from proxpo.ops.outcomes import solved
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.types import Batch


class PromptResponses(NamedTuple):
    """One row per prompt, its scored responses in their order; `there` marks the filled places.

    length: tokens of a response, or of its longest turn, as limits hold for each turn
    """

    prompt_id: Int[Tensor, " prompt"]
    right: Bool[Tensor, "prompt place"]
    length: Float[Tensor, "prompt place"]
    there: Bool[Tensor, "prompt place"]

    @property
    def size(self) -> Int[Tensor, " prompt"]:
        return self.there.sum(dim=1)


def responses_by_prompt(batch: Batch, *, by: str, truncated_wrong: bool = False) -> PromptResponses:
    """Outcomes and lengths of each prompt's responses; truncated_wrong: a truncated one is wrong.

    Responses without a reward are left out. Those without tokens, pruned ones for example, have
    their outcome and the length 0.
    """
    prompt_id = batch.require("prompt_id", by=by)
    right = solved(batch, by=by)
    if truncated_wrong and batch.truncated is not None:
        right = right & ~batch.truncated
    scored = torch.ones_like(right) if batch.rewards is None else ~batch.rewards.isnan()
    rows = scored.nonzero()[:, 0]
    rows = rows[prompt_id[rows].argsort(stable=True)]
    prompts, number, sizes = prompt_id[rows].unique_consecutive(
        return_inverse=True, return_counts=True
    )
    place = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[number]
    blank = torch.zeros(len(prompts), int(sizes.max()) if len(sizes) else 0, device=rows.device)

    def table(column: Tensor) -> Tensor:
        return blank.to(column.dtype).index_put((number, place), column[rows])

    return PromptResponses(
        prompts, table(right), table(_lengths(batch)), table(torch.ones_like(scored))
    )


def _lengths(batch: Batch) -> Float[Tensor, " seq"]:
    if batch.turn is None:
        return batch.mask.sum(dim=1).double()
    turn = torch.where(batch.mask, batch.turn, 0)
    counts = batch.mask.new_zeros(len(turn), int(turn.max()) + 1 if turn.numel() else 1).double()
    return counts.scatter_add(1, turn, batch.mask.double()).amax(dim=1)


__all__ = ["PromptResponses", "responses_by_prompt"]
