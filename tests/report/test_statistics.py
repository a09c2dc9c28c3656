"""Statistics of few seeds, against slow references and by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize
from scipy.stats import t as student

from proxpo.report.statistics import (
    area,
    bootstrap_band,
    bootstrap_interval,
    convex_hull,
    holm,
    interquartile_mean,
    median_reached,
    paired,
    reached,
    student_interval,
    value_at,
)

few = st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=2, max_size=6)


def exact_bootstrap(values):
    """All n^n resamples instead of a random few: the 2.5 % and 97.5 % points of their means."""
    means = [np.mean(draw) for draw in itertools.product(values, repeat=len(values))]
    return np.percentile(means * 100, [2.5, 97.5])  # repeated: no points between its few values


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_bootstrap_agrees_with_all_resamples(n):
    values = np.random.default_rng(n).normal(size=n)
    low, high = exact_bootstrap(values)
    found = bootstrap_interval(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(low, abs=0.12 * np.ptp(values))
    assert found.high == pytest.approx(high, abs=0.12 * np.ptp(values))
    assert found == bootstrap_interval(values)


def test_a_band_is_the_interval_of_every_column():
    curves = np.random.default_rng(0).normal(size=(5, 7))
    low, high = bootstrap_band(curves)
    each = [bootstrap_interval(column) for column in curves.T]
    np.testing.assert_allclose(low, [one.low for one in each])
    np.testing.assert_allclose(high, [one.high for one in each])


def test_one_seed_has_no_interval():
    for interval in (student_interval(np.array([0.5])), bootstrap_interval(np.array([0.5]))):
        assert interval.mean == 0.5
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
    assert not paired(np.array([1.0]), np.array([0.0])).decides


@given(few)
def test_student_interval_solves_its_equation(values):
    """The bound is where a t-test of that mean has p = 0.05, found by root search."""
    x = np.array(values)
    found = student_interval(x)
    if np.std(x) < 1e-3:
        return

    def p_minus(mean):
        statistic = abs(x.mean() - mean) / (np.std(x, ddof=1) / math.sqrt(len(x)))
        return 2 * student.sf(statistic, len(x) - 1) - 0.05

    assert found.high == pytest.approx(optimize.brentq(p_minus, x.mean(), x.mean() + 1e3), rel=1e-6)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_with_three_seeds_the_bootstrap_is_the_narrow_one():
    values = np.array([0.1, 0.2, 0.4])
    narrow, wide = bootstrap_interval(values), student_interval(values)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_student_covers_where_the_bootstrap_does_not():
    """Three normal seeds, mean 0: how often each interval holds it. The reason for the choice."""
    draws = np.random.default_rng(0).normal(size=(400, 3))
    held = lambda one: one.low <= 0 <= one.high  # noqa: E731
    assert np.mean([held(student_interval(x)) for x in draws]) == pytest.approx(0.95, abs=0.03)
    assert np.mean([held(bootstrap_interval(x)) for x in draws[:100]]) < 0.85


def test_pairing_finds_a_difference_that_means_hide():
    seeds = np.array([0.30, 0.50, 0.70, 0.90])
    better = seeds + np.array([0.020, 0.025, 0.022, 0.018])
    found = paired(better, seeds)
    assert found.decides
    assert found.student.low > 0.01
    alone = student_interval(better), student_interval(seeds)
    assert alone[0].low < alone[1].high


@given(few, few)
def test_a_pair_the_other_way_round_is_its_negative(a, b):
    n = min(len(a), len(b))
    one, other = paired(np.array(a[:n]), np.array(b[:n])), paired(np.array(b[:n]), np.array(a[:n]))
    assert one.student.low == pytest.approx(-other.student.high, abs=1e-12)
    assert one.decides == other.decides


def test_the_interval_and_the_p_value_agree():
    draw = np.random.default_rng(3)
    for _ in range(50):
        found = paired(draw.normal(0.6, 0.5, size=4), np.zeros(4))
        assert found.decides == (found.p < 0.05)


def test_equal_differences_decide_nothing():
    found = paired(np.array([0.75, 0.5, 0.25]), np.array([0.5, 0.25, 0.0]))
    assert found.student.mean == 0.25
    assert not found.decides
    assert math.isnan(found.p)


def test_differences_that_rounding_alone_tells_apart_are_equal():
    found = paired(np.array([0.6, 0.7, 0.8]), np.array([0.5, 0.6, 0.7]))
    assert found.constant
    assert not found.decides
    assert not found.holds_zero
    assert math.isnan(found.p)
    zero = paired(np.array([0.1 + 0.2, 0.5]), np.array([0.3, 0.5]))
    assert (zero.student.low, zero.student.high) == (0.0, 0.0)
    assert zero.holds_zero
    assert not zero.constant
    assert not paired(np.array([0.5]), np.array([0.4])).holds_zero  # one seed: no interval


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert math.isnan(holm([math.nan, 0.02])[0])
    assert holm([math.nan, 0.02])[1] == 0.02


def test_interquartile_mean():
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, 4.0, -90.0, 5.0, 6.0])) == 3.5
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == 3.0
    assert math.isnan(interquartile_mean(np.array([])))


def test_reaching_a_score():
    x, y = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.2, 0.4, 0.3, 0.8])
    assert reached(x, y, 0.1) == 0.0
    assert reached(x, y, 0.3) == pytest.approx(5.0)
    assert reached(x, y, 0.55) == pytest.approx(25.0)
    assert reached(x, y, 0.9) == math.inf


def test_median_counts_those_that_never_arrive():
    assert median_reached([3.0, 1.0, math.inf]) == 3.0
    assert median_reached([3.0, math.inf, math.inf]) == math.inf
    assert median_reached([1.0, 2.0, 3.0, math.inf]) == 2.0
    assert math.isnan(median_reached([]))


@given(few.map(np.cumsum), st.floats(0.05, 1.0))
def test_area_is_the_integral(y, share):
    x = np.arange(len(y)) * 3.0 + 1
    end = 1 + share * (x[-1] - 1)
    inner = [float(one) for one in x if 1 < one < end]
    reference, _ = integrate.quad(lambda at: np.interp(at, x, y), 1, end, points=inner or None)
    assert area(x, y, end) == pytest.approx(reference / (end - 1), abs=1e-6)


def test_area_does_not_look_past_the_curve():
    assert math.isnan(area(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 2.0))
    assert math.isnan(area(np.array([0.0]), np.array([0.0]), 1.0))
    assert math.isnan(value_at(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.5))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14))
def test_hull_holds_every_point(points):
    points = [(float(x), float(y)) for x, y in points]
    corners = convex_hull(points)
    assert set(corners) <= set(points)
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1]):
        for x, y in points:
            assert (bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0 or len(corners) < 3
    # slow: a corner is the one point farthest in some direction
    angles = np.linspace(0, 2 * math.pi, 3600, endpoint=False)
    known = np.array(sorted(set(points)))
    along = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ known.T
    alone = (along > along.max(axis=1, keepdims=True) - 1e-9).sum(axis=1) == 1
    slow = {tuple(known[i]) for i in along[alone].argmax(axis=1)}
    assert sorted(slow) == sorted(corners)
