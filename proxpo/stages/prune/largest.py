"""Pruning by the size of the advantage."""

from typing import Literal

import torch

from proxpo.ops.masked import row_max
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, Metrics

Pruned = Literal["smallest", "largest", "random"]
Floor = Literal["kept", "removed"]


def keep_best(
    score: Float[Tensor, " seq"],
    present: Bool[Tensor, " seq"],
    group: Int[Tensor, " seq"],
    *,
    rate: float,
    floor: Floor = "kept",
) -> Bool[Tensor, " seq"]:
    """The ⌊G(1 - rate)⌋ largest scores among the G present rows of each group; first rows win ties.

    floor="removed": all but ⌊G·rate⌋. Rows that are not present take no part and are not kept.
    """
    rows = present.nonzero()[:, 0]
    order = rows[score[rows].argsort(descending=True, stable=True)]
    order = order[group[order].argsort(stable=True)]
    _, sizes = group[order].unique_consecutive(return_counts=True)
    start = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rank = torch.arange(len(order), device=order.device) - start
    share = 1 - rate if floor == "kept" else rate
    count = (sizes.double() * share + 1e-9).floor()  # in floats 6·(1 - 2/3) is a little below 2
    most = (count if floor == "kept" else sizes - count).repeat_interleave(sizes)
    kept = torch.zeros_like(present)
    kept[order[rank < most]] = True
    return kept


@stage("prune")
def largest_advantages(
    *,
    rate: float = 0.5,
    pool: Literal["question", "batch"] = "question",
    prune: Pruned = "smallest",
    floor: Floor = "kept",
    prompt_factor: float = 1.0,
):
    """Keeps the ⌊G(1 - P)⌋ responses of largest |A| to each prompt, P the rate. arXiv:2503.22342.

    floor="removed" drops ⌊G·P⌋ instead, which keeps one more where G·P is not a whole number.
    pool="batch" ranks all responses that this process holds instead. prune="largest" drops the
    largest, "random" any. |A| is the largest over the tokens; ties go to the earlier row. The
    others leave every denominator; advantages stay as they are. prompt_factor: how many times the
    prompts a trainer draws, so that pruned batches are full.

    rate: P, the share of responses that leaves
    pool: rank within each "question" or over the "batch"
    prune: responses that leave: "smallest", "largest" or "random"
    floor: round down the number that is "kept" or "removed"
    prompt_factor: prompts that a trainer draws, in multiples, so that pruned batches are full
    """
    check_numbers("largest_advantages", "[0, 1)", rate=rate)
    check_numbers("largest_advantages", "[1, inf)", prompt_factor=prompt_factor)

    def keep(batch: Batch, ctx: Context) -> tuple[Bool[Tensor, "seq tok"], Metrics]:
        present = batch.mask.any(dim=1)
        group = batch.group if pool == "question" else torch.zeros_like(present, dtype=torch.int64)
        kept = keep_best(_score(batch, prune, ctx), present, group, rate=rate, floor=floor)
        share = kept.sum() / present.sum().clamp(min=1)
        return kept[:, None].expand_as(batch.mask), {"prune/kept": share}

    grouped = pool == "question"
    return Parts(
        apply=keep,
        needs=("group",) if grouped else (),
        whole_batch=grouped,
        idle=() if rate else ("pool", "prune", "floor"),
    )


def _score(batch: Batch, prune: Pruned, ctx: Context) -> Float[Tensor, " seq"]:
    if prune == "random":
        device = batch.mask.device if ctx.generator is None else ctx.generator.device
        drawn = torch.rand(len(batch.mask), generator=ctx.generator, device=device)
        return drawn.to(batch.mask.device)
    size = batch.advantages.abs()
    if size.dim() == 2:
        size = row_max(size, batch.mask)
    return size if prune == "smallest" else -size
