"""Statistics over a few seeds: intervals, paired differences, cost to reach a score.

Pure functions of arrays. Everything random draws from a generator of its own with a fixed seed, so
the same files give the same report. Why two kinds of interval: docs/decisions/0003-statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000
ROUNDING = 1e-12  # differences of scores below this share of the scores are of the arithmetic
Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with an interval around it; NaN bounds where there are too few values for one."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Paired differences a - b over the seeds both have."""

    seeds: int
    student: Interval
    bootstrap: Interval
    p: float

    @property
    def holds_zero(self) -> bool:
        """True where there is a Student interval and zero lies in it."""
        return self.student.low <= 0 <= self.student.high

    @property
    def constant(self) -> bool:
        """True where the difference is the same on all seeds, and not zero."""
        return self.seeds > 1 and self.student.low == self.student.high != 0

    @property
    def decides(self) -> bool:
        """True where the Student interval excludes zero.

        Differences that are all equal have an interval of no width, which is a sign of a coarse
        score and not of certainty: they decide nothing.
        """
        low, high = self.student.low, self.student.high
        return self.seeds > 1 and low < high and (low > 0 or high < 0)


def interquartile_mean(values: Array) -> float:
    """Mean of the middle half; below four values nothing is cut and it is the mean."""
    return float(stats.trim_mean(values, 0.25)) if len(values) else math.nan


def student_interval(values: Array) -> Interval:
    """x̄ ± t₀.₉₇₅,ₙ₋₁ s/√n."""
    n, mean = len(values), _mean(values)
    if n < 2:
        return Interval(mean=mean, low=math.nan, high=math.nan)
    if np.ptp(values) == 0:  # the mean of equal numbers need not be the number, bit for bit
        return Interval(mean=float(values[0]), low=float(values[0]), high=float(values[0]))
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def bootstrap_interval(values: Array) -> Interval:
    """The mean and the 2.5 % and 97.5 % points of means of values drawn with replacement."""
    low, high = bootstrap_band(np.asarray(values, dtype=float)[:, None])
    return Interval(mean=_mean(values), low=float(low[0]), high=float(high[0]))


def bootstrap_band(curves: Array) -> tuple[Array, Array]:
    """Percentile bootstrap of the mean over the first axis (seeds), column by column.

    The same draws serve all columns. One seed says nothing of its spread: NaN.
    """
    if len(curves) < 2 or not curves.size:
        nothing = np.full(curves.shape[1:], math.nan)
        return nothing, nothing
    interval = stats.bootstrap(
        (curves,),
        np.mean,
        axis=0,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        vectorized=True,
        batch=200,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return np.asarray(interval.low), np.asarray(interval.high)


def paired(a: Array, b: Array) -> Difference:
    """Intervals and a two-sided Student p-value of the mean of a - b, seed by seed.

    Differences that rounding alone tells apart (0.8 - 0.7 and 0.7 - 0.6) are equal.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    d = a - b
    size = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    spread = len(d) > 1 and float(np.ptp(d)) > ROUNDING * size
    if len(d) > 1 and not spread:
        d = np.full(len(d), 0.0 if abs(np.median(d)) <= ROUNDING * size else np.median(d))
    return Difference(
        seeds=len(d),
        student=student_interval(d),
        bootstrap=bootstrap_interval(d),
        p=float(stats.ttest_1samp(d, 0.0).pvalue) if spread else math.nan,
    )


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979); NaN stays and does not count."""
    known = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    corrected, highest = list(p), 0.0
    for rank, (value, i) in enumerate(known):
        highest = max(highest, min(1.0, value * (len(known) - rank)))
        corrected[i] = highest
    return corrected


def reached(x: Array, y: Array, target: float) -> float:
    """The x at which y first meets the target, linear between points; infinite if it never does."""
    hits = np.flatnonzero(np.asarray(y) >= target)
    if not len(hits):
        return math.inf
    i = int(hits[0])
    if i == 0:
        return float(x[0])
    share = (target - y[i - 1]) / (y[i] - y[i - 1])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def value_at(x: Array, y: Array, at: float) -> float:
    """y at a point inside the range of x, linear between points; NaN outside."""
    if not len(x) or math.isnan(at):
        return math.nan
    return float(np.interp(at, x, y, left=math.nan, right=math.nan))


def area(x: Array, y: Array, end: float) -> float:
    """Mean height of the curve from its first point to `end`: (1/(end-x₀)) ∫ y dx."""
    if len(x) < 2 or end <= x[0] or end > x[-1]:
        return math.nan
    inside = np.asarray(x) < end
    xs = np.append(np.asarray(x)[inside], end)
    ys = np.append(np.asarray(y)[inside], value_at(x, y, end))
    return float(np.trapezoid(ys, xs) / (end - x[0]))


def median_reached(costs: Sequence[float]) -> float:
    """Median over runs, where one that never arrived counts as infinite."""
    return float(np.quantile(costs, 0.5, method="inverted_cdf")) if len(costs) else math.nan


def convex_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners counter-clockwise (Andrew's monotone chain); two for a line, one for a point."""
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered
    lower, upper = _chain(ordered), _chain(ordered[::-1])
    return lower[:-1] + upper[:-1]


def _chain(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for point in points:
        while len(kept) > 1 and _turn(kept[-2], kept[-1], point) <= 0:
            kept.pop()
        kept.append(point)
    return kept


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _mean(values: Array) -> float:
    return float(np.mean(values)) if len(values) else math.nan


__all__ = [
    "LEVEL",
    "Difference",
    "Interval",
    "area",
    "bootstrap_band",
    "bootstrap_interval",
    "convex_hull",
    "holm",
    "interquartile_mean",
    "median_reached",
    "paired",
    "reached",
    "student_interval",
    "value_at",
]
