"""Figures of single numbers: differences, settings that were varied or tried, cost of a step."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proxpo.compare.plan import Arm
from proxpo.report.analysis import Analysis, ArmResult
from proxpo.report.figures import Figure, Spot
from proxpo.report.metrics import phases, series
from proxpo.report.run_data import Run

WHISKER = "Point: mean over seeds. Bar: Student's 95 % interval."


def differences(analysis: Analysis) -> list[Figure]:
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


def robustness(analysis: Analysis) -> list[Figure]:
    """Final score along each varied setting, one line a family; arms without it as reference."""
    keys = dict.fromkeys(key for one in analysis.arms for key in one.arm.varied)
    found = [_along(key, analysis) for key in keys]
    return [one for one in found if one.data]


def _along(key: str, analysis: Analysis) -> Figure:
    having = [one for one in analysis.arms if key in one.arm.varied]
    data = [_spot(one, _kin(one.arm, key), at=_value(one.arm.varied[key])) for one in having]
    data += [_spot(one, one.arm.name, at="") for one in analysis.arms if one not in having]
    ticks = [_value(value) for value in _ordered(one.arm.varied[key] for one in having)]
    others = " Dashed: arms without this setting." if len(having) < len(data) else ""
    return Figure(
        key="robust-" + re.sub(r"[^A-Za-z0-9_]+", "-", key),
        title=f"Robustness to {key.replace('_', ' ').replace('+', ' and ')}",
        kind="spots",
        caption=f"Final score. {WHISKER}{others}",
        x=key,
        y=analysis.variant.label,
        share=analysis.variant.share,
        data=[one for one in data if not math.isnan(one.mean)],
        ticks=list(dict.fromkeys(ticks)),
    )


def _kin(arm: Arm, key: str) -> str:
    """The arms that differ in `key` alone."""
    others = [f"{name}={_value(value)}" for name, value in arm.varied.items() if name != key]
    return " ".join([arm.family or arm.method, *others])


def _spot(result: ArmResult, group: str, *, at: str) -> Spot:
    one = result.student("final")
    return Spot(arm=result.arm.name, group=group, at=at, mean=one.mean, low=one.low, high=one.high)


def tuning(analysis: Analysis) -> list[Figure]:
    """The score of every swept setting on the tuning seeds; the one that was taken is ringed."""
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
    taken = {(one.arm, _place(one.settings, swept)) for one in analysis.comparison.chosen}
    data = [
        Spot(
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
    one = Figure(
        key="tuning",
        title="Settings tried",
        kind="spots",
        caption=f"Mean final score on the tuning seeds ({', '.join(map(str, seeds))}), which are "
        "not reported. Ringed: taken to the reported seeds.",
        x=", ".join(swept),
        y=analysis.variant.label,
        share=analysis.variant.share,
        data=data,
        ticks=list(dict.fromkeys(_place(run.settings, swept) for run in tune)),
    )
    return [one] if data else []


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
    """`3e-05` where one setting is swept, `lr=3e-05, p=-1` where several are."""
    if len(swept) == 1:
        return _value(settings.get(swept[0]))
    return ", ".join(f"{key}={_value(settings.get(key))}" for key in swept)


def cost(analysis: Analysis) -> list[Figure]:
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


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ordered(values: Any) -> list[Any]:
    found = list(values)
    numeric = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in found)
    return sorted(found) if numeric else found


__all__ = ["cost", "differences", "robustness", "tuning"]
