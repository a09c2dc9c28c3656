"""Clip bounds searched until tokens of positive advantage supply their share of the surrogate."""

import functools
import math
from typing import Literal, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.masked import masked_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.trust.clip import check_dual, clip_between
from proxpo.types import Batch, Context, PerToken, Scope

BalanceStatistic = Literal["official", "paper", "gradient"]
MOST_BOUNDS = 10_000


class Search(NamedTuple):
    """Target of the search, and the bounds it tries: from, to, step."""

    target: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]


class Bounds(NamedTuple):
    """All c_low, all c_high, and the edges they make on one axis: -c_low, 0, c_high."""

    low: Float[Tensor, " low"]
    high: Float[Tensor, " high"]
    edges: Float[Tensor, " edge"]


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

    statistic: measure of balance and order of the search: "official", "paper", "gradient"
    target: balance at which the search stops; none: the statistic's own
    low_from, low_to, low_step: lower bounds that are tried; none: the statistic's own
    high_from, high_to, high_step: upper bounds that are tried; none: the statistic's own
    dual: ceiling on the loss of tokens with A < 0, in units of |A|; none: no ceiling
    scope: "batch": balance of the whole optimizer step; "microbatch": of each micro-batch
    """
    default = SEARCHES[statistic]
    check_numbers("balanced_clip", "[0, inf)", target=target)
    goal = default.target if target is None else target
    official = statistic == "official"
    lows = _grid("low", (low_from, low_to, low_step), default.low, cut=official)
    highs = _grid("high", (high_from, high_to, high_step), default.high, cut=official)
    if lows[0] < 0 or lows[-1] > highs[0]:
        raise ProxpoError(f"balanced_clip: need 0 ≤ low ≤ high, got {lows[-1]} and {highs[0]}")
    check_dual(dual, by="balanced_clip")
    path = _path(len(lows), len(highs), lower_first=official)

    @functools.cache  # a copy from the host makes a GPU wait
    def tables(dtype: torch.dtype, device: torch.device) -> tuple[Bounds, Tensor, Tensor]:
        rise_low, rise_high = torch.tensor(path, device=device).unbind(1)
        return _bounds(lows, highs, dtype, device), rise_low, rise_high

    def surrogate(ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context) -> PerToken:
        bounds, rise_low, rise_high = tables(ratio.dtype, ratio.device)
        push, pull = _sums(ratio.detach(), batch, bounds, statistic)
        push, pull = ctx.all_sum(torch.cat([push, pull]), scope).split([len(highs), len(lows)])
        balance = _balance(push[rise_high], pull[rise_low], statistic)
        met = balance >= goal
        met[-1] = True  # the last bounds stay if none will do
        at = met.int().argmax()  # the first of them
        # take, where an index by a single number would make the host wait for it
        lower, upper = bounds.low.take(rise_low.take(at)), bounds.high.take(rise_high.take(at))
        x, clipped = clip_between(ratio, batch.advantages, lower, upper, dual=dual)
        return x, {
            "trust/clipped": masked_mean(clipped, batch.mask),
            "trust/low": lower,
            "trust/high": upper,
            "trust/balance": balance.take(at).clamp(max=1e6).to(ratio.dtype),
        }

    needs = ("rollout_logp",) if statistic == "paper" else ()
    return Parts(apply=surrogate, needs=needs)


def _balance(push: Tensor, pull: Tensor, statistic: str) -> Float[Tensor, " step"]:
    """P/(N + 1e-8) or P/(P + N); without negative tokens there is nothing to balance."""
    share = push / (pull + 1e-8 if statistic == "official" else push + pull)
    return share.masked_fill(pull <= 0, torch.inf)


def _sums(
    r: Float[Tensor, "seq tok"], batch: Batch, bounds: Bounds, statistic: str
) -> tuple[Float[Tensor, " high"], Float[Tensor, " low"]]:
    """P for every c_high and N for every c_low, in one pass over the tokens and in float64.

    On one axis lie r of positive tokens and -r of negative ones. The bounds cut it into buckets,
    and the sums Σ w A r and Σ w A of the buckets are added up from either side.
    """
    a = torch.where(batch.mask, batch.advantages, 0.0).double()
    if statistic == "paper":
        a = a * batch.rollout_logp.detach().exp()
    low, high, edges = bounds
    signed = torch.copysign(r.clamp(min=torch.finfo(r.dtype).tiny), batch.advantages)
    bucket = torch.bucketize(signed, edges, right=True)
    empty = a.new_zeros(len(r), len(edges) + 1)  # buckets of each response by itself: no collisions
    moved, weight = (empty.scatter_add(1, bucket, x).sum(0) for x in (a * r, a))
    middle = len(low) + 1  # the first bucket of positive tokens
    push = moved[middle:-1].cumsum(0)
    pull = -moved[: middle - 1].cumsum(0).flip(0)
    if statistic != "gradient":
        push = push + high * weight[middle + 1 :].flip(0).cumsum(0).flip(0)
        pull = pull - low * weight[1:middle].flip(0).cumsum(0)
    return push, pull


def _bounds(
    lows: list[float], highs: list[float], dtype: torch.dtype, device: torch.device
) -> Bounds:
    low, high = (torch.tensor(side, dtype=dtype, device=device) for side in (lows, highs))
    return Bounds(low, high, torch.cat([-low.flip(0), low.new_zeros(1), high]))


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
    if not (all(map(math.isfinite, (first, last, step))) and 0 <= steps <= MOST_BOUNDS):
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
