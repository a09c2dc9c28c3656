"""Clip bounds searched until tokens of positive advantage supply their share of the surrogate."""

import math
from typing import Literal, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages.trust.clip import check_dual, clip_between
from proxpo.types import Batch, Context, PerToken, Scope

BalanceStatistic = Literal["official", "paper", "gradient"]
MOST_BOUNDS = 10_000


class Search(NamedTuple):
    """Target of the search, and the bounds it tries: from, to, step."""

    target: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]


# The paper does not give its steps; those are ours.
SEARCHES: dict[str, Search] = {
    "official": Search(1.0, (0.6, 0.8, 0.05), (1.2, 2.0, 0.05)),
    "paper": Search(0.4, (0.6, 0.9, 0.05), (1.2, 3.0, 0.1)),
    "gradient": Search(0.4, (0.6, 0.9, 0.05), (1.2, 3.0, 0.1)),
}


@stage("trust", takes=("ratio",), gives="loss")
def balanced_clip(
    *,
    statistic: BalanceStatistic = "official",
    target: float | None = None,
    low_from: float | None = None,
    low_to: float | None = None,
    low_step: float | None = None,
    high_from: float | None = None,
    high_to: float | None = None,
    high_step: float | None = None,
    dual: float | None = 3.0,
    scope: Scope = "batch",
):
    """x = max(-A r, -A clip(r, c_low, c_high)), the bounds searched anew. BAPO, arXiv:2510.18927.

        P = Σ_{A>0} w min(r, c_high) A,   N = Σ_{A<0} w max(r, c_low) |A|

    "official": P/N ≥ target with w = 1, c_low rises first. "paper": P/(P+N) ≥ target with
    w = π_rollout, c_high rises first. "gradient" (an extension): the share over tokens that still
    have a gradient, which also answers to c_low. None takes the statistic's own range.
    """
    default = SEARCHES[statistic]
    goal = default.target if target is None else target
    official = statistic == "official"
    lows = _grid("low", (low_from, low_to, low_step), default.low, cut=official)
    highs = _grid("high", (high_from, high_to, high_step), default.high, cut=official)
    if lows[0] < 0 or lows[-1] > highs[0]:
        raise ProxpoError(f"balanced_clip: need 0 ≤ low ≤ high, got {lows[-1]} and {highs[0]}")
    check_dual(dual, by="balanced_clip")
    path = _path(len(lows), len(highs), lower_first=official)

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        push, pull = _sums(ratio.detach(), batch, lows, highs, statistic)
        totals = ctx.all_sum(torch.cat([push, pull]), scope).tolist()
        pushes, pulls = totals[: len(highs)], totals[len(highs) :]
        for at in path:
            balance = _balance(pushes[at[1]], pulls[at[0]], statistic)
            if balance >= goal:
                break
        lower, upper = lows[at[0]], highs[at[1]]
        x, clipped = clip_between(ratio, batch.advantages, lower, upper, dual=dual)
        numbers = {"low": lower, "high": upper, "balance": min(balance, 1e6)}
        return x, {
            "trust/clipped": masked_mean(clipped, batch.mask),
            **{f"trust/{name}": ratio.new_tensor(value) for name, value in numbers.items()},
        }

    needs = ("rollout_logp",) if statistic == "paper" else ()
    return Parts(apply=surrogate, needs=needs)


def _balance(push: float, pull: float, statistic: str) -> float:
    """P/(N + 1e-8) or P/(P + N); without negative tokens there is nothing to balance."""
    if pull <= 0:
        return math.inf
    return push / (pull + 1e-8) if statistic == "official" else push / (push + pull)


def _sums(
    r: Float[Tensor, "seq tok"], batch: Batch, lows: list[float], highs: list[float], statistic: str
) -> tuple[Float[Tensor, " high"], Float[Tensor, " low"]]:
    """P for every c_high and N for every c_low, in one pass over the tokens and in float64."""
    weight = torch.where(batch.mask, batch.advantages, 0.0).double()
    if statistic == "paper":
        weight = weight * batch.rollout_logp.detach().exp()
    high, low = (torch.tensor(e, dtype=r.dtype, device=r.device) for e in (highs, lows))
    live, held = _split(r, weight.clamp(min=0), high, right=True)
    still, kept = _split(r, (-weight).clamp(min=0), low, right=False)
    push = live.cumsum(0)[:-1]
    pull = still.flip(0).cumsum(0).flip(0)[1:]
    if statistic != "gradient":
        push = push + high * held.flip(0).cumsum(0).flip(0)[1:]
        pull = pull + low * kept.cumsum(0)[:-1]
    return push, pull


def _split(r: Tensor, weight: Tensor, edges: Tensor, *, right: bool) -> tuple[Tensor, Tensor]:
    """Σ w r and Σ w of the tokens between neighbouring edges."""
    bucket = torch.bucketize(r.contiguous(), edges, right=right).flatten()
    zeros = weight.new_zeros(len(edges) + 1)
    weight = weight.flatten()
    return zeros.index_add(0, bucket, weight * r.flatten()), zeros.index_add(0, bucket, weight)


def _grid(
    side: str,
    bounds: tuple[float | None, float | None, float | None],
    default: tuple[float, float, float],
    *,
    cut: bool,
) -> list[float]:
    """Bounds from the first to the last; cut=True adds the last where no step ends on it."""
    first, last, step = (d if g is None else g for g, d in zip(bounds, default))
    steps = (last - first) / step if step > 0 else math.inf
    if not (math.isfinite(first) and 0 <= steps <= MOST_BOUNDS):
        raise ProxpoError(
            f"balanced_clip: {side} goes from {first} to {last} in steps of {step}, which is not "
            f"at most {MOST_BOUNDS} positive steps"
        )
    grid = [min(first + k * step, last) for k in range(math.floor(steps + 1e-9) + 1)]
    return [*grid, last] if cut and grid[-1] < last - 1e-9 else grid


def _path(lows: int, highs: int, *, lower_first: bool) -> list[tuple[int, int]]:
    """The pairs of bounds in the order they are tried; the last one is kept if none will do."""
    if lower_first:
        return [*((i, 0) for i in range(lows)), *((lows - 1, j) for j in range(1, highs))]
    if lows == 1:  # the paper's loop ends where c_low cannot rise
        return [(0, 0)]
    return [*((0, j) for j in range(highs)), *((i, highs - 1) for i in range(1, lows))]
