"""Figures of means with intervals: differences, varied and swept settings, cost of a step."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proxpo.compare.plan import Arm
from proxpo.report.analysis import Analysis, ArmResult
from proxpo.report.figures import Figure, MeanPoint
from proxpo.report.metrics import phase_seconds, series
from proxpo.report.run_data import Run

WHISKER = "Point: mean over seeds. Bar: Student's 95 % interval."


def difference_figure(analysis: Analysis) -> list[Figure]:
    """The best-ranked arm minus each other arm, where they share seeds."""
    finals = [
        pair for pair in analysis.pairs if pair.measure == "final" and pair.difference.seeds > 1
    ]
    best = analysis.arms[0].arm.name if analysis.arms else ""
    shown = [pair for pair in finals if pair.a == best]
    if not shown:
        return []
    data = [
        {
            "arm": pair.b,
            "mean": pair.difference.student.mean,
            "low": pair.difference.student.low,
            "high": pair.difference.student.high,
            "boot": [pair.difference.bootstrap.low, pair.difference.bootstrap.high],
            "seeds": pair.difference.seeds,
            "decides": bool(pair.winner),
        }
        for pair in shown
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


def robustness_figures(analysis: Analysis) -> list[Figure]:
    """Final score along each varied setting, one line a family; arms without it as reference."""
    keys = dict.fromkeys(key for result in analysis.arms for key in result.arm.varied)
    figures = [_along(key, analysis) for key in keys]
    return [figure for figure in figures if figure.data]


def _along(key: str, analysis: Analysis) -> Figure:
    having = [result for result in analysis.arms if key in result.arm.varied]
    data = [
        _mean_point(result, _group(result.arm, key), at=_value(result.arm.varied[key]))
        for result in having
    ]
    data += [
        _mean_point(result, result.arm.name, at="")
        for result in analysis.arms
        if result not in having
    ]
    ticks = [_value(value) for value in _ordered(result.arm.varied[key] for result in having)]
    others = " Dashed: arms without this setting." if len(having) < len(data) else ""
    return Figure(
        key="robust-" + re.sub(r"[^A-Za-z0-9_]+", "-", key),
        title=f"Robustness to {key.replace('_', ' ').replace('+', ' and ')}",
        kind="means",
        caption=f"Final score. {WHISKER}{others}",
        x=key,
        y=analysis.variant.label,
        share=analysis.variant.share,
        data=[result for result in data if not math.isnan(result.mean)],
        ticks=list(dict.fromkeys(ticks)),
    )


def _group(arm: Arm, key: str) -> str:
    """The name of the group of arms that differ in `key` alone."""
    others = [f"{name}={_value(value)}" for name, value in arm.varied.items() if name != key]
    return " ".join([arm.family or arm.method, *others])


def _mean_point(result: ArmResult, group: str, *, at: str) -> MeanPoint:
    interval = result.student("final")
    return MeanPoint(
        arm=result.arm.name,
        group=group,
        at=at,
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
    )


def tuning_figure(analysis: Analysis) -> list[Figure]:
    """Score of every swept setting on the tuning seeds; the chosen one is ringed."""
    runs, score = analysis.comparison.runs, analysis.score
    tune = [run for run in runs if run.role == "tune"]
    if score is None or not tune:
        return []
    swept = _swept(tune)
    places: dict[tuple[str, str], list[float]] = {}
    for i, run in enumerate(runs):
        if run.role == "tune" and run.status == "done" and i in score.names:
            final = float(series(run, score.names[i]).values[-1])
            places.setdefault((run.name, _place(run.settings, swept)), []).append(final)
    taken = {(choice.arm, _place(choice.settings, swept)) for choice in analysis.comparison.chosen}
    data = [
        MeanPoint(
            arm=arm,
            group=arm,
            at=at,
            mean=float(np.mean(values)),
            low=math.nan,
            high=math.nan,
            chosen=(arm, at) in taken,
        )
        for (arm, at), values in places.items()
    ]
    seeds = sorted({run.seed for run in tune if run.seed is not None})
    figure = Figure(
        key="tuning",
        title="Settings tried",
        kind="means",
        caption=f"Mean final score on the tuning seeds ({', '.join(map(str, seeds))}), which are "
        "not reported. Ringed: taken to the reported seeds.",
        x=", ".join(swept),
        y=analysis.variant.label,
        share=analysis.variant.share,
        data=data,
        ticks=list(dict.fromkeys(_place(run.settings, swept) for run in tune)),
    )
    return [figure] if data else []


def _swept(tune: Sequence[Run]) -> list[str]:
    """The settings that differ between an arm's tuning runs."""
    keys = dict.fromkeys(key for run in tune for key in run.settings)
    return [
        key
        for key in keys
        if any(
            len({_value(run.settings.get(key)) for run in tune if run.name == name}) > 1
            for name in {run.name for run in tune}
        )
    ]


def _place(settings: Mapping[str, Any], swept: Sequence[str]) -> str:
    """The tick of a swept setting: `3e-05`, or `lr=3e-05, p=-1` where several are swept."""
    if len(swept) == 1:
        return _value(settings.get(swept[0]))
    return ", ".join(f"{key}={_value(settings.get(key))}" for key in swept)


def cost_figure(analysis: Analysis) -> list[Figure]:
    """Seconds of each phase of a step."""
    data = []
    for result in analysis.arms:
        each = [phase_seconds(seconds.run) for seconds in result.runs]
        names = dict.fromkeys(name for seconds in each for name in seconds)
        parts = {
            name: float(np.mean([seconds.get(name, 0.0) for seconds in each])) for name in names
        }
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


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ordered(values: Any) -> list[Any]:
    ordered = list(values)
    numeric = all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in ordered
    )
    return sorted(ordered) if numeric else ordered


__all__ = ["cost_figure", "difference_figure", "robustness_figures", "tuning_figure"]
