"""Rollouts shared out as a knapsack: each to the prompt that gains most. arXiv:2509.25849."""

import math
from typing import Literal

import torch

from proxpo.ops.shapes import Bool, Float, Int, Tensor

Counts = Int[Tensor, " prompt"]
Rates = Float[Tensor, " prompt"]


def knapsack_value(n: Float[Tensor, "..."], p: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Value(N, p) = [1 - p^N - (1-p)^N]·p(1-p)²: chance of a mixed group times what it teaches."""
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


def exact_extras(p: Rates, *, low: int, high: int, budget: int) -> Counts:
    """Extra rollouts k_i ≤ high - low with Σ k_i = budget that maximise Σ Value(low + k_i, p_i).

    The value is concave in N, so the optimum takes the largest marginal gains,
    Value(N+1) - Value(N) = p(1-p)²·[p^N (1-p) + (1-p)^N p]; the earlier prompt wins a tie.
    """
    n = torch.arange(low, high, dtype=torch.float64, device=p.device)[:, None]
    q = 1 - p
    gain = p * q.square() * (p**n * q + q**n * p)
    if not budget:
        return torch.zeros(len(p), dtype=torch.int64, device=p.device)
    last = gain.flatten().kthvalue(gain.numel() - budget + 1).values
    extras = (gain > last).sum(dim=0)
    tied = (gain == last).nonzero()[: budget - int(extras.sum()), 1]
    return extras + torch.bincount(tied, minlength=len(p))


def official_extras(p: Rates, *, low: int, high: int, budget: int) -> Counts:
    """The released dynamic programme: like the exact one, but no extra rollout is worth 0.

    So it prefers to give every prompt one. Time grows with prompts x budget x choices.
    """
    most = high - low
    k = torch.arange(most + 1, dtype=torch.float64, device=p.device)
    worth = knapsack_value(low + k[None, :], p[:, None])
    worth[:, 0] = 0.0
    best = torch.full((budget + 1,), -torch.inf, dtype=torch.float64, device=p.device)
    best[0] = 0.0
    choices = []
    for row in worth:
        # Before spending k here, b - k had been spent.
        before = torch.nn.functional.pad(best, (most, 0), value=-torch.inf).unfold(0, most + 1, 1)
        best, chosen = (before.flip(1) + row).max(dim=1)
        choices.append(chosen)
    spent, extras = budget, torch.zeros(len(p), dtype=torch.int64, device=p.device)
    for i in range(len(p) - 1, -1, -1):
        extras[i] = choices[i][spent]
        spent -= int(extras[i])
    return extras


def expected_cost(
    p: Rates, *, confidence: float, form: Literal["quantile", "expectation"]
) -> Rates:
    """Rollouts until the outcomes differ: ln(1-a)/ln max(p, 1-p), or the mean 1/(p(1-p)) - 1."""
    if form == "expectation":
        return 1 / (p * (1 - p)) - 1
    return math.log(1 - confidence) / torch.maximum(p, 1 - p).log()


def shared(surplus: int, among: Bool[Tensor, " prompt"]) -> Counts:
    """The surplus in equal parts over the marked prompts; the first ones get the remainder."""
    n = int(among.sum())
    part = torch.zeros(len(among), dtype=torch.int64, device=among.device)
    if n:
        part[among] = surplus // n
        part[among.nonzero()[: surplus % n, 0]] += 1
    return part


def allocate(
    rate: Rates,
    known: Bool[Tensor, " prompt"],
    default: Counts,
    *,
    low: int,
    high: int,
    positive: int,
    negative: int,
    confidence: float = 0.9,
    cost: Literal["quantile", "expectation"] = "quantile",
    fallback: bool = True,
    official: bool = False,
) -> Counts:
    """Rollouts for each prompt, Σ default in all.

    Prompts not known well keep their default, always solved ones get `positive`, never solved ones
    `negative`, the rest `low` and what the knapsack adds. What the rest is not expected to need
    (fallback=True), or cannot take, goes to prompts of rate 0, unknown ones included, or to all
    others; where there are no others it stays with the knapsack.
    """
    rate = torch.where(known, rate, 0.0)
    effective = known & (rate > 0) & (rate < 1)
    unsolved = rate == 0
    samples = torch.where(known, torch.where(unsolved, negative, positive), default)
    samples = torch.where(effective, low, samples)
    left, p = int(default.sum() - samples.sum()), rate[effective]
    takers = unsolved if unsolved.any() else ~effective
    if not len(p):
        return samples + shared(left, unsolved) if unsolved.any() else default
    spend = min(left, len(p) * (high - low))
    if fallback and takers.any():
        wanted = expected_cost(p, confidence=confidence, form=cost).clamp(max=high).floor()
        spend = min(spend, int(wanted.sum()))
    extras = (official_extras if official else exact_extras)(p, low=low, high=high, budget=spend)
    samples[effective] += extras
    return samples + shared(left - spend, takers)


__all__ = [
    "allocate",
    "exact_extras",
    "expected_cost",
    "knapsack_value",
    "official_extras",
    "shared",
]
