"""Advantages standardised over all visits of a prompt, not the present one alone."""

from typing import NamedTuple

import torch

from proxpo.ops.groups import group_stats
from proxpo.ops.masked import spread
from proxpo.ops.prompt_memory import blank, recall, remember
from proxpo.ops.shapes import Bool, Float, Int, Tensor
from proxpo.stages import Parts, stage
from proxpo.types import Batch, Context, Metrics, PerToken, State

COLUMNS = ("visits", "mean", "std")


class Visit(NamedTuple):
    """Per response: number of this visit, statistics of this one and of all up to it."""

    number: Float[Tensor, " seq"]
    mean: Float[Tensor, " seq"]
    std: Float[Tensor, " seq"]
    all_mean: Float[Tensor, " seq"]
    all_std: Float[Tensor, " seq"]
    counted: Bool[Tensor, " seq"]


def visit(batch: Batch, state: State) -> Visit:
    """μ̄' = μ̄ + (μ - μ̄)/i,   σ̄'² = (k σ̄² + σ² + (k/i)(μ - μ̄)²)/i,   i = k + 1.

    Sample variances are pooled as if they were population ones, as the released code does. The mean
    moves by a difference, so that equal rewards at every visit keep a variance of exactly 0.
    """
    now = group_stats(batch.rewards.double(), batch.group)
    k, mean, std = (
        recall(state, name, batch.prompt_id) if state else torch.zeros_like(now.mean)
        for name in COLUMNS
    )
    i = k + 1
    step = torch.where(k > 0, now.mean - mean, 0.0)
    all_mean = torch.where(k > 0, mean + step / i, now.mean)
    variance = (k * std.square() + now.std.square() + k / i * step.square()) / i
    return Visit(i, now.mean, now.std, all_mean, variance.sqrt(), now.scored & (now.size > 1))


def count_visits(state: State, batch: Batch) -> State:
    """The state with this batch's visits of each prompt counted."""
    order = _visit_in_batch(batch)
    for number in range(int(order.max()) + 1 if len(order) else 0):
        part = batch.rows((order == number).nonzero()[:, 0])
        now = visit(part, state)
        columns = {"visits": now.number, "mean": now.all_mean, "std": now.all_std}
        kept = {name: column[now.counted] for name, column in columns.items()}
        state = remember(state, part.prompt_id[now.counted], kept)
    return state


def _visit_in_batch(batch: Batch) -> Int[Tensor, " seq"]:
    """0 for the first group of each prompt in the batch, 1 for its second, and so on."""
    pairs = torch.stack([batch.prompt_id, batch.group], dim=1)
    pairs, index = pairs.unique(dim=0, return_inverse=True)  # sorted, groups of a prompt together
    _, counts = pairs[:, 0].unique_consecutive(return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return (torch.arange(len(pairs), device=first.device) - first)[index]


@stage("advantage")
def smooth_standardised(*, history: bool = True):
    """A = the smaller of S_new and S_tot in magnitude. DCPO's SAS, arXiv:2509.02333.

        A_new = (R - μ)/σ,   A_tot = (R - μ̄')/σ̄'   over all visits of the prompt, this one included
        S_new = ((i-1)/i) A_new + (1/i) A_tot,   S_tot = (1/i) A_new + ((i-1)/i) A_tot

    i counts the visits of `prompt_id`. A zero spread gives 0 for its part; a group with fewer than
    two rewards gives 0 and is no visit. history=False: every visit is the first, A = A_new.

    history: standardise over all visits of the prompt; false: the present one alone
    """

    def init() -> State:
        return blank(*COLUMNS) if history else {}

    def update(state: State, batch: Batch, metrics: Metrics) -> State:
        known = batch.rewards is not None and batch.prompt_id is not None
        return count_visits(state, batch) if history and known else state

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        now = visit(batch, ctx.state)
        new = _standard(batch.rewards, now.mean, now.std)
        total = _standard(batch.rewards, now.all_mean, now.all_std)
        share = 1 / now.number
        s_new = (1 - share) * new + share * total
        s_total = share * new + (1 - share) * total
        out = torch.where(s_new.abs() < s_total.abs(), s_new, s_total)
        out = torch.where(now.counted, out, 0.0).to(batch.logp.dtype)
        return spread(out, batch.mask), {}

    needs = ("rewards", "group", "prompt_id") if history else ("rewards", "group")
    return Parts(apply=advantage, init=init, update=update, needs=needs)


def _standard(rewards: Tensor, mean: Tensor, std: Tensor) -> Float[Tensor, " seq"]:
    return torch.where(std > 0, (rewards - mean) / std, 0.0)
