"""Curves over training, and the score against the drift they lead to."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from proxpo.report.analysis import Analysis
from proxpo.report.figures import POINTS, Cloud, Curve, Figure, digits, thin
from proxpo.report.metrics import SCORE, Quantity, Series, pick_variant, series
from proxpo.report.run_data import Run
from proxpo.report.statistics import bootstrap_band, convex_hull

BAND = "Line: mean over seeds. Band: bootstrap 95 % of the mean."


def curve_figures(analysis: Analysis, wanted: Sequence[Quantity], section: str) -> list[Figure]:
    return [figure for quantity in wanted if (figure := _curve_figure(analysis, quantity, section))]


def _curve_figure(analysis: Analysis, quantity: Quantity, section: str) -> Figure | None:
    runs = analysis.comparison.runs
    picked = analysis.score if quantity is SCORE else pick_variant(quantity, runs)
    if picked is None or (quantity is not SCORE and picked.names == analysis.names):
        return None  # not measured, or drawn as the score already
    data, averaged = [], 1.0
    for result in analysis.arms:
        own = {
            i: series(runs[i], name)
            for i, name in picked.names.items()
            if runs[i].name == result.arm.name and runs[i].role != "tune"
        }
        if own:
            data.append(_curve(result.arm.name, own, runs))
            averaged = max(averaged, max(len(curve.steps) for curve in own.values()) / POINTS)
    if not data:
        return None
    words = [BAND if any(len(curve.runs) > 1 for curve in data) else "One run an arm: no band."]
    if averaged > 1:
        words.append(f"Each point averages about {math.ceil(averaged)} steps; the last is exact.")
    missing = [
        result.arm.name
        for result in analysis.arms
        if result.arm.name not in {curve.arm for curve in data}
    ]
    if missing:
        words.append(f"Not measured by {', '.join(missing)}.")
    return Figure(
        key=quantity.key,
        title=picked.variant.title or quantity.title,
        kind="curves",
        caption=" ".join(words),
        x="step",
        y=picked.variant.label,
        share=picked.variant.share,
        log=quantity.free and _spans_decades(data),
        data=data,
        section=section,
    )


def _spans_decades(curves: Sequence[Curve]) -> bool:
    values = [y for curve in curves for run in curve.runs for y in run["y"]]
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _curve(arm: str, own: Mapping[int, Series], runs: Sequence[Run]) -> Curve:
    """The curve of an arm; its mean is over finished runs, at the steps all of them have."""
    done = [curve for i, curve in own.items() if runs[i].status == "done"]
    steps = _common([curve.steps for curve in done])
    table = np.array([curve.values[np.isin(curve.steps, steps)] for curve in done])
    x, y = thin(steps, table.reshape(len(done), len(steps)))
    low, high = bootstrap_band(y)
    each = []
    for i, curve in own.items():
        few = thin(*curve)
        each.append({"run": i, "x": digits(few.steps), "y": digits(few.values)})
    mean = y.mean(axis=0) if len(done) else np.empty(0)
    return Curve(
        arm=arm, x=digits(x), mean=digits(mean), low=digits(low), high=digits(high), runs=each
    )


def _common(steps: Sequence[np.ndarray]) -> np.ndarray:
    shared = steps[0] if steps else np.empty(0)
    for each in steps[1:]:
        shared = np.intersect1d(shared, each)
    return shared


def drift_figure(analysis: Analysis) -> list[Figure]:
    """Score against KL drift: ends of runs and their hulls."""
    runs, score, kl = analysis.comparison.runs, analysis.score, analysis.kl
    if score is None or kl is None:
        return []
    place = {id(run): i for i, run in enumerate(runs)}
    data = []
    for result in analysis.arms:
        ends, trails = [], []
        for measured in result.runs:
            i = place[id(measured.run)]
            if math.isnan(measured.kl):
                continue
            drift, values = series(measured.run, kl.names[i]), series(measured.run, score.names[i])
            path = _joined(drift, values, analysis.end, last=(measured.kl, measured.final))
            few = thin(path[:, 0], path[:, 1], 60)
            trails.append({"run": i, "x": digits(few[0]), "y": digits(few[1])})
            ends.append({"run": i, "x": measured.kl, "y": measured.final})
        if ends:
            hull = convex_hull([(end["x"], end["y"]) for end in ends])
            data.append(Cloud(arm=result.arm.name, points=ends, trail=trails, hull=hull))
    if not data:
        return []
    return [
        Figure(
            key="drift",
            title="Score against drift",
            kind="cloud",
            caption=f"Each marker is a run at step {analysis.end:g}; the faint line is its way "
            "there. Shaded: convex hull of an arm's runs. Up and to the left is better.",
            x=kl.variant.label,
            y=score.variant.label,
            share=score.variant.share,
            data=data,
        )
    ]


def _joined(x: Series, y: Series, end: float, *, last: tuple[float, float]) -> np.ndarray:
    """(x, y) at the steps before `end` at which both were measured, then the point at `end`."""
    steps = np.intersect1d(x.steps, y.steps)
    steps = steps[steps < end]
    both = [curve.values[np.isin(curve.steps, steps)] for curve in (x, y)]
    return np.append(np.stack(both, axis=1), [last], axis=0)


__all__ = ["curve_figures", "drift_figure"]
