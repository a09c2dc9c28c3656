"""Advantages from the rewards of the other responses to the same prompt."""

import math
from typing import Literal

import torch

from proxpo.ops.groups import GroupStats, group_stats, over_std
from proxpo.ops.masked import moments, spread
from proxpo.ops.shapes import Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.types import Batch, Context, PerToken

Singleton = Literal["raw", "zero"]


@stage("advantage", needs=("rewards", "group"))
def group_relative(
    *,
    scale: Literal["group", "batch", "centred", "none"] = "group",
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "raw",
    bound: float = math.inf,
):
    """A_i = (r_i - mean_g) / (std_g + eps), one value per response, held within ±bound.

    scale="group" divides by the group's std (GRPO); "batch" by the std of all rewards (TRL);
    "centred" by the std of all centred rewards (ScaleRL); "none" does not divide (Dr. GRPO).
    A group of one: singleton="raw" keeps the reward (mean 0, std 1, as verl), "zero" gives 0.
    Responses without a reward (NaN) are left out of the statistics and get 0.

    scale: divisor: std of the "group", of the "batch", of all "centred" rewards, or "none"
    eps: added to the std
    unbiased: std over n-1 (true) or n
    singleton: "raw": a response alone in its group keeps its reward; "zero": it gets 0
    bound: largest magnitude of an advantage
    """
    check_numbers("group_relative", "(0, inf]", bound=bound)
    check_numbers("group_relative", "[0, inf)", eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        stats = group_stats(batch.rewards, batch.group, unbiased=unbiased)
        centred = torch.where(stats.scored, batch.rewards - stats.mean, 0.0)
        divisor: Tensor = torch.ones_like(centred)
        if scale == "group":
            divisor = stats.std + eps
        elif scale != "none":
            values = batch.rewards if scale == "batch" else centred
            filled = torch.where(stats.scored, values, 0.0)[:, None]
            _, variance, _ = moments(
                filled, stats.scored[:, None], unbiased=unbiased, all_sum=ctx.all_sum
            )
            divisor = (variance.sqrt() + eps).expand_as(centred)
        out = _single(over_std(centred, divisor), batch, stats, singleton).clamp(-bound, bound)
        return spread(out, batch.mask), {}

    return Parts(apply=advantage, idle=("eps", "unbiased") if scale == "none" else ())


@stage("advantage", needs=("rewards", "group"))
def leave_one_out(*, normalise: bool = False, eps: float = 1e-4, singleton: Singleton = "zero"):
    """A_i = r_i - mean of the other responses = G/(G-1) · (r_i - mean_g). RLOO, arXiv:2402.14740.

    normalise=True also standardises over the batch, (A - mean)/(std + eps), as TRL offers.

    normalise: centre and scale the advantages over the batch
    eps: added to the std
    singleton: "raw": a response alone in its group keeps its reward; "zero": it gets 0
    """
    check_numbers("leave_one_out", "[0, inf)", eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        stats = group_stats(batch.rewards, batch.group)
        factor = stats.size / (stats.size - 1).clamp(min=1)
        out = torch.where(stats.scored, factor * (batch.rewards - stats.mean), 0.0)
        out = _single(out, batch, stats, singleton)
        if normalise:
            mean, variance, _ = moments(out[:, None], stats.scored[:, None], all_sum=ctx.all_sum)
            out = torch.where(stats.scored, over_std(out - mean, variance.sqrt() + eps), 0.0)
        return spread(out, batch.mask), {}

    return Parts(apply=advantage, idle=() if normalise else ("eps",))


@stage("advantage", needs=("rewards", "group"))
def length_weighted_baseline(*, singleton: Singleton = "raw"):
    """A_i = r_i - Σ_j L_j r_j / Σ_j L_j over the group: OPO's variance-optimal baseline.

    Σ_i L_i A_i = 0 per group. arXiv:2505.23585.

    singleton: "raw": a response alone in its group keeps its reward; "zero": it gets 0
    """

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        lengths = batch.mask.sum(dim=1).to(batch.rewards.dtype)
        stats = group_stats(batch.rewards, batch.group, weight=lengths)
        out = torch.where(stats.scored, batch.rewards - stats.mean, 0.0)
        return spread(_single(out, batch, stats, singleton), batch.mask), {}

    return advantage


@stage("advantage", needs=("token_rewards", "group"))
def group_process(*, eps: float = 1e-6):
    """A_it = sum of the group-standardised step rewards of the steps ending at or after token t.

    GRPO's process supervision, arXiv:2402.03300 section 4.1.3. A step's reward sits on its last
    token, marked by `step_end` (without it: wherever a token reward is not 0). A group's only step
    gets 0.

    eps: added to the std
    """
    check_numbers("group_process", "[0, inf)", eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        scored = batch.token_rewards != 0 if batch.step_end is None else batch.step_end
        scored = scored & batch.mask
        rows, _ = scored.nonzero(as_tuple=True)
        rewards = batch.token_rewards[scored]
        stats = group_stats(rewards, batch.group[rows])
        standard = torch.zeros_like(batch.token_rewards)
        standard[scored] = over_std(rewards - stats.mean, stats.std + eps)
        return standard.flip(1).cumsum(1).flip(1), {}

    return advantage


def _single(out: Tensor, batch: Batch, stats: GroupStats, singleton: str) -> Tensor:
    alone = stats.scored & (stats.size == 1)
    return torch.where(alone, batch.rewards if singleton == "raw" else 0.0, out)
