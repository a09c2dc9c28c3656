"""The figures of a comparison as plain data: the page and the printed files draw the same."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxpo.compare.plan import Arm
from proxpo.report.analysis import Analysis, ArmResult
from proxpo.report.quantities import CURVES, SCORE, Quantity, Series, phases, pick, series
from proxpo.report.runs import Run
from proxpo.report.statistics import bootstrap_band, convex_hull, student_interval

POINTS = 240  # of a curve: more than a panel has pixels to tell apart
BAND = "Line: mean over seeds. Band: bootstrap 95 % of the mean."
WHISKER = "Point: mean over seeds. Bar: Student's 95 % interval."


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One arm over steps, and its runs one by one."""

    arm: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[dict[str, Any]]  # {"run", "x", "y"}: position of the run, its own curve


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Where one arm's runs ended, and all points they passed."""

    arm: str
    points: list[dict[str, Any]]  # {"run", "x", "y"}: the end of each run
    trail: list[dict[str, Any]]  # {"run", "x", "y"}: its way there
    hull: list[tuple[float, float]]  # of the ends


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A mean with its interval at one place of an axis of names."""

    arm: str  # decides the colour
    group: str  # joined by a line
    at: str
    mean: float
    low: float
    high: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`kind` is curves, cloud, spots, forest or bars and says what `data` holds."""

    key: str
    title: str
    kind: str
    caption: str
    x: str
    y: str
    data: list[Any]
    share: bool = False
    ticks: list[str] = field(default_factory=list)  # of an axis of names
    section: str = "Results"


def figures(analysis: Analysis) -> list[Figure]:
    """Everything the runs allow to draw, in reading order."""
    found = [
        *_curves(analysis, [SCORE], "Results"),
        *_differences(analysis),
        *_cloud(analysis),
        *_curves(analysis, CURVES[:2], "Results"),
        *_robustness(analysis),
        *_tuning(analysis),
        *_curves(analysis, CURVES[2:], "What happened inside"),
        *_phases(analysis),
    ]
    return found


def thin(steps: np.ndarray, values: np.ndarray, most: int = POINTS) -> Series:
    """At most `most` points: means of equal parts (last axis), and the exact last value."""
    n = steps.shape[-1]
    if n <= most:
        return Series(steps, values)
    parts = np.linspace(0, n - 1, most).astype(int)
    length = np.diff(parts)

    def means(array: np.ndarray) -> np.ndarray:
        sums = np.add.reduceat(array[..., : n - 1], parts[:-1], axis=-1)
        return np.concatenate([sums / length, array[..., -1:]], axis=-1)

    return Series(means(steps), means(values))


def _curves(analysis: Analysis, wanted: Sequence[Quantity], section: str) -> list[Figure]:
    return [one for quantity in wanted if (one := _curve_figure(analysis, quantity, section))]


def _curve_figure(analysis: Analysis, quantity: Quantity, section: str) -> Figure | None:
    runs = analysis.comparison.runs
    picked = analysis.score if quantity is SCORE else pick(quantity, runs)
    if picked is None:
        return None
    data, averaged = [], 1.0
    for result in analysis.arms:
        own = {
            i: series(runs[i], name)
            for i, name in picked.names.items()
            if runs[i].name == result.arm.name and runs[i].role != "tune"
        }
        if own:
            data.append(_curve(result.arm.name, own, runs))
            averaged = max(averaged, max(len(one.steps) for one in own.values()) / POINTS)
    if not data:
        return None
    words = [BAND if any(len(one.runs) > 1 for one in data) else "One run an arm: no band."]
    if averaged > 1:
        words.append(f"Each point averages about {math.ceil(averaged)} steps; the last is exact.")
    missing = [one.arm.name for one in analysis.arms if one.arm.name not in {c.arm for c in data}]
    if missing:
        words.append(f"Not measured by {', '.join(missing)}.")
    return Figure(
        key=quantity.key,
        title=quantity.title,
        kind="curves",
        caption=" ".join(words),
        x="step",
        y=picked.variant.label,
        share=picked.variant.share,
        data=data,
        section=section,
    )


def _curve(arm: str, own: Mapping[int, Series], runs: Sequence[Run]) -> Curve:
    """The mean is over finished runs, at the steps all of them have."""
    done = [one for i, one in own.items() if runs[i].status == "done"]
    steps = _common([one.steps for one in done])
    table = np.array([one.values[np.isin(one.steps, steps)] for one in done])
    x, y = thin(steps, table.reshape(len(done), len(steps)))
    low, high = bootstrap_band(y)
    each = []
    for i, one in own.items():
        few = thin(*one)
        each.append({"run": i, "x": digits(few.steps), "y": digits(few.values)})
    mean = y.mean(axis=0) if len(done) else np.empty(0)
    return Curve(
        arm=arm, x=digits(x), mean=digits(mean), low=digits(low), high=digits(high), runs=each
    )


def _common(steps: Sequence[np.ndarray]) -> np.ndarray:
    found = steps[0] if steps else np.empty(0)
    for one in steps[1:]:
        found = np.intersect1d(found, one)
    return found


def _cloud(analysis: Analysis) -> list[Figure]:
    """Score against KL drift: ends of runs and their hulls."""
    runs, score, kl = analysis.comparison.runs, analysis.score, analysis.kl
    if score is None or kl is None:
        return []
    data = []
    for result in analysis.arms:
        ends, trails = [], []
        for i, name in score.names.items():
            if i not in kl.names or runs[i].name != result.arm.name or not _drawn(runs[i]):
                continue
            path = _joined(series(runs[i], kl.names[i]), series(runs[i], name), analysis.end)
            if len(path):
                few = thin(path[:, 0], path[:, 1], 60)
                trails.append({"run": i, "x": digits(few[0]), "y": digits(few[1])})
                ends.append({"run": i, "x": float(path[-1, 0]), "y": float(path[-1, 1])})
        if ends:
            hull = convex_hull([(one["x"], one["y"]) for one in ends])
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


def _drawn(run: Run) -> bool:
    return run.role != "tune" and run.status == "done"


def _joined(x: Series, y: Series, end: float) -> np.ndarray:
    """(x, y) at the steps both were measured, up to `end`."""
    steps = np.intersect1d(x.steps, y.steps)
    steps = steps[steps <= end]
    both = [one.values[np.isin(one.steps, steps)] for one in (x, y)]
    return np.stack(both, axis=1)


def _differences(analysis: Analysis) -> list[Figure]:
    """The best-ranked arm against each other one."""
    finals = [one for one in analysis.pairs if one.measure == "final" and one.difference.seeds > 1]
    best = analysis.arms[0].arm.name if analysis.arms else ""
    shown = [one for one in finals if one.a == best]
    if not shown:
        return []
    data = [
        {
            "arm": one.b,
            "mean": one.difference.student.mean,
            "low": one.difference.student.low,
            "high": one.difference.student.high,
            "boot": [one.difference.bootstrap.low, one.difference.bootstrap.high],
            "seeds": one.difference.seeds,
            "decides": bool(one.winner),
        }
        for one in shown
    ]
    return [
        Figure(
            key="differences",
            title=f"{best} minus each other arm",
            kind="forest",
            caption="Paired difference in final score, seed by seed. Thin bar: Student's 95 % "
            "interval, which decides; thick bar: bootstrap. Filled: the interval excludes zero.",
            x=f"difference in {analysis.variant.label}",
            y="",
            share=analysis.variant.share,
            data=data,
        )
    ]


def _robustness(analysis: Analysis) -> list[Figure]:
    """Final score along each varied setting, one line a family; others as reference."""
    results = {one.arm.name: one for one in analysis.arms}
    arms = [arm for arm in analysis.comparison.arms if arm.name in results]
    keys = dict.fromkeys(key for arm in arms for key in varied(arm, arms))
    found = []
    for key in keys:
        data = [
            _spot(results[arm.name], arm.family or arm.method, at=_value(varied(arm, arms)[key]))
            for arm in arms
            if key in varied(arm, arms)
        ]
        data += [
            _spot(results[arm.name], arm.name, at="")
            for arm in arms
            if key not in varied(arm, arms)
        ]
        ticks = [
            _value(v)
            for v in _ordered(varied(a, arms)[key] for a in arms if key in varied(a, arms))
        ]
        others = " Dashed: arms without this setting." if any(not one.at for one in data) else ""
        found.append(
            Figure(
                key=f"robust-{key.replace('.', '-')}",
                title=f"Robustness to {key.replace('_', ' ')}",
                kind="spots",
                caption=f"Final score. {WHISKER}{others}",
                x=key,
                y=analysis.variant.label,
                share=analysis.variant.share,
                data=[one for one in data if not math.isnan(one.mean)],
                ticks=list(dict.fromkeys(ticks)),
            )
        )
    return [one for one in found if one.data]


def varied(arm: Arm, arms: Sequence[Arm]) -> dict[str, Any]:
    """The settings in which an arm differs from others of its family."""
    if arm.varied:
        return dict(arm.varied)
    kin = [one for one in arms if one.method == arm.method]
    return {
        key: value
        for key, value in arm.settings.items()
        if len({_value(one.settings.get(key)) for one in kin}) > 1
    }


def _spot(result: ArmResult, group: str, *, at: str) -> Spot:
    one = result.student("final")
    return Spot(arm=result.arm.name, group=group, at=at, mean=one.mean, low=one.low, high=one.high)


def _tuning(analysis: Analysis) -> list[Figure]:
    """The score of every swept setting on the tuning seeds; the one that was taken is ringed."""
    runs, score = analysis.comparison.runs, analysis.score
    chosen = {one.arm: dict(one.settings) for one in analysis.comparison.chosen}
    if score is None or not any(run.role == "tune" for run in runs):
        return []
    places: dict[tuple[str, str], list[float]] = {}
    taken: dict[tuple[str, str], bool] = {}
    swept = _swept(runs)
    for i, run in enumerate(runs):
        if run.role == "tune" and i in score.names and run.status == "done":
            at = _setting({key: run.settings.get(key) for key in swept})
            places.setdefault((run.name, at), []).append(float(series(run, score.names[i])[1][-1]))
            picked = chosen.get(run.name)
            taken[run.name, at] = picked is not None and all(
                run.settings.get(key) == picked.get(key) for key in swept
            )
    tune = [run for run in runs if run.role == "tune"]
    ticks = [_setting({key: run.settings.get(key) for key in swept}) for run in tune]
    data = []
    for (arm, at), values in places.items():
        one = student_interval(np.array(values))
        data.append(
            Spot(
                arm=arm,
                group=arm,
                at=at,
                mean=one.mean,
                low=math.nan,
                high=math.nan,
                chosen=taken[arm, at],
            )
        )
    seeds = sorted({run.seed for run in tune if run.seed is not None})
    return (
        [
            Figure(
                key="tuning",
                title="Settings tried",
                kind="spots",
                caption=f"Mean final score on the tuning seeds ({', '.join(map(str, seeds))}), "
                "which are not reported. Ringed: taken to the reported seeds.",
                x=", ".join(swept),
                y=analysis.variant.label,
                share=analysis.variant.share,
                data=data,
                ticks=list(dict.fromkeys(ticks)),
            )
        ]
        if data
        else []
    )


def _swept(runs: Sequence[Run]) -> list[str]:
    """The settings that differ between an arm's tuning runs."""
    tune = [run for run in runs if run.role == "tune"]
    keys = dict.fromkeys(key for run in tune for key in run.settings)
    return [
        key
        for key in keys
        if any(
            len({_value(run.settings.get(key)) for run in tune if run.name == name}) > 1
            for name in {run.name for run in tune}
        )
    ]


def _phases(analysis: Analysis) -> list[Figure]:
    """Where the seconds of a step go."""
    data = []
    for result in analysis.arms:
        each = [phases(one.run) for one in result.runs]
        names = dict.fromkeys(name for one in each for name in one)
        parts = {name: float(np.mean([one.get(name, 0.0) for one in each])) for name in names}
        if parts:
            data.append({"arm": result.arm.name, "parts": parts})
    if not data:
        return []
    return [
        Figure(
            key="cost",
            title="Cost per step",
            kind="bars",
            caption="Mean seconds of each part of a step, over all finished runs.",
            x="seconds",
            y="",
            data=data,
            section="What happened inside",
        )
    ]


def _setting(settings: Mapping[str, Any]) -> str:
    if len(settings) == 1:
        return _value(next(iter(settings.values())))
    return ", ".join(f"{key}={_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ordered(values: Any) -> list[Any]:
    found = list(values)
    numeric = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in found)
    return sorted(found) if numeric else found


def digits(values: np.ndarray) -> list[float]:
    """Five significant digits, as many as can be seen; the last value exact."""
    rounded = [float(f"{value:.5g}") for value in values.tolist()]
    return [*rounded[:-1], float(values[-1])] if rounded else []


__all__ = ["Cloud", "Curve", "Figure", "Spot", "figures", "thin", "varied"]
