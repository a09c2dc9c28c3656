"""Advantages that the policy's entropy changes: per response, or per step of an agent."""

from typing import Literal

import torch

from proxpo.ops.extremes import batch_max, batch_min
from proxpo.ops.groups import group_sum_over_cuts, numbered
from proxpo.ops.masked import row_mean, spread
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.advantage.group_relative import group_relative
from proxpo.stages.advantage.returns import next_valid
from proxpo.stages.ratio.turn import turn_index
from proxpo.types import Batch, Context, Metrics, PerToken, State

ENTROPY = "advantage/entropy"  # the metric that the first batch's mean entropy is kept from
NO_ENTROPY = -1.0


@stage("advantage", needs=("rewards", "group", "entropy"), live=True)
def entropy_penalised(*, gamma: float = 0.1, most: float = 0.6931, if_calm: bool = True):
    """A'_i = δ_i (r_i - mean_g - γ H_i), δ_i = 1[H_i ≤ most]. GTPO, arXiv:2508.03772.

    H_i is the mean entropy of the response under the current policy, without gradient: each update
    computes it anew. if_calm=True: δ acts only in a run whose first batch had a mean H at or below
    `most`. A group of one keeps -γH alone; a response without a reward gets 0.

    gamma: weight of the response's entropy
    most: largest mean entropy of a response that is trained on
    if_calm: apply `most` only in runs that start below it
    """
    check_numbers("entropy_penalised", "[0, inf)", gamma=gamma)
    check_numbers("entropy_penalised", "(0, inf]", most=most)

    def init() -> State:
        return {"initial": torch.tensor(NO_ENTROPY, dtype=torch.float64)}

    def update(state: State, batch: Batch, metrics: Metrics) -> State:
        if state["initial"] >= 0 or ENTROPY not in metrics:
            return state
        return {"initial": metrics[ENTROPY].detach().double().cpu()}

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        group = numbered(batch)
        scored = ~batch.rewards.isnan()
        counted = scored.to(batch.logp.dtype)
        r = torch.nan_to_num(batch.rewards, nan=0.0).to(batch.logp.dtype)
        sums = group_sum_over_cuts(torch.stack([counted, r], 1), group, all_sum=ctx.all_sum)
        size, total = sums.unbind(1)
        h = row_mean(batch.entropy.detach(), batch.mask)
        filled = batch.mask.any(dim=1).to(h.dtype)
        total_entropy, rows = ctx.all_sum(torch.stack([h.sum(), filled.sum()]).double())
        now = total_entropy / rows.clamp(min=1)
        first = ctx.state.get("initial", torch.tensor(NO_ENTROPY)).to(now)
        first = torch.where(first >= 0, first, now)
        dropped = (h > most) & (not if_calm or bool(first <= most))
        out = torch.where(scored & ~dropped, r - total / size.clamp(min=1) - gamma * h, 0.0)
        cut, every = ctx.all_sum(torch.stack([dropped.sum(), filled.new_tensor(len(h))]).double())
        share = cut / every.clamp(min=1)
        return spread(out, batch.mask), {ENTROPY: now, "advantage/dropped": share}

    return Parts(apply=advantage, init=init, update=update)


@stage("advantage")
def entropy_modulated(
    *,
    k: float = 1.0,
    k_future: float = 1.0,
    bonus: float = 0.1,
    split: Literal["turn", "mask", "response"] = "turn",
    scale: Literal["group", "batch", "centred", "none"] = "group",
    eps: float = 1e-6,
    tiny: float = 1e-8,
):
    """A_it = A_i g_it + ζ f_i,t+1, centred over all steps t of the batch. EMPG, arXiv:2509.09265.

        H̃ = (H - min)/(max - min + tiny),   g = exp(-k H̃)/(mean exp(-k H̃) + tiny)
        f = exp(-k' H̃), of the next step; 0 for the last one

    H_it is the mean entropy of a step's tokens; min, max and means run over the steps of the whole
    batch, each counted once. A_i is group_relative(scale, eps). Steps are the turns of the batch,
    the maximal runs of valid tokens ("mask"), or whole responses. Responses without a reward are
    no part of it.

    k: sharpness of the weight by a step's own certainty
    k_future: sharpness of the bonus for a certain next step
    bonus: ζ, the weight of that bonus
    split: a step: a "turn", a run of valid tokens ("mask") or a whole "response"
    scale: divisor of the rewards, as in group_relative
    eps: added to the std
    tiny: added to divisors of entropies
    """
    check_numbers("entropy_modulated", "[0, inf)", k=k, k_future=k_future, bonus=bonus, eps=eps)
    check_numbers("entropy_modulated", "(0, inf)", tiny=tiny)
    base = group_relative(scale=scale, eps=eps)

    def advantage(batch: Batch, ctx: Context) -> PerToken:
        trajectory, _ = base.apply(batch, ctx)
        index = torch.zeros_like(batch.mask, dtype=torch.int64)
        index = index if split == "response" else turn_index(batch, split)
        h, there = _steps(batch, index)
        high, low = (f(h, there, all_sum=ctx.all_sum) for f in (batch_max, batch_min))
        scaled = (h - low) / (high - low + tiny)
        g = (-k * scaled).exp()
        total, n = ctx.all_sum(torch.stack([g[there].sum(), there.sum().to(g.dtype)]))
        n = n.clamp(min=1)
        g = g / (total / n + tiny)
        clear = next_valid((-k_future * scaled).exp().masked_fill(~there, 0.0), there)
        a = trajectory.sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)
        out = a[:, None] * g + bonus * clear
        mean = ctx.all_sum(out[there].sum()[None])[0] / n
        final = torch.where(there, out - mean, 0.0).gather(1, index)
        return torch.where(batch.mask, final, 0.0), {"advantage/steps": n}

    needs = ("rewards", "group", "entropy")
    unpaid = () if bonus else ("k_future",)
    after = ("k_future", "bonus") if split == "response" else unpaid  # no step follows
    return Parts(
        apply=advantage,
        needs=(*needs, "turn") if split == "turn" else needs,
        idle=(("eps",) if scale == "none" else ()) + after,
    )


def _steps(
    batch: Batch, index: Tensor
) -> tuple[Float[Tensor, "seq step"], Bool[Tensor, "seq step"]]:
    """Mean entropy of each step of each response, and which steps have tokens and a reward."""
    entropy = batch.entropy.detach().masked_fill(~batch.mask, 0.0)
    blank = entropy.new_zeros(len(index), int(index.max()) + 1 if index.numel() else 1)
    length = blank.scatter_add(1, index, batch.mask.to(entropy.dtype))
    mean = blank.scatter_add(1, index, entropy) / length.clamp(min=1)
    return mean, (length > 0) & ~batch.rewards.isnan()[:, None]
