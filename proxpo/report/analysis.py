"""Results of a comparison: numbers of each arm, paired differences, and verdicts they allow."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from proxpo.compare.plan import Arm
from proxpo.report.common_steps import CommonSteps, align_curves
from proxpo.report.comparability import (
    Settings,
    declared_settings,
    difference_lines,
    distinct_settings,
    settings_of,
    undeclared_differences,
)
from proxpo.report.metrics import (
    KL,
    SCORE,
    PickedVariant,
    Series,
    Variant,
    other_accuracy,
    pick_variant,
    samples_drawn,
    seconds_spent,
    series,
)
from proxpo.report.notes import analysis_notes, listed
from proxpo.report.run_data import Comparison, Run
from proxpo.report.statistics import (
    Difference,
    Interval,
    area,
    bootstrap_interval,
    holm,
    interquartile_mean,
    median_reached,
    paired,
    reached,
    student_interval,
    value_at,
)


@dataclass(frozen=True, kw_only=True)
class ReachCost:
    """The cost of first reaching a score; infinite where it was never reached."""

    target: float
    steps: float
    samples: float
    seconds: float
    kl: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One finished, reported run in numbers, all taken at the steps that every run shares."""

    run: Run
    start: float
    final: float
    area: float
    kl: float
    step_seconds: float
    reach: tuple[ReachCost, ...]


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """An arm over its seeds. Failed and unfinished runs are counted, not averaged."""

    arm: Arm
    settings: Mapping[str, Any]  # the swept setting that was chosen
    runs: tuple[MeasuredRun, ...]
    failed: int
    unfinished: int
    broken: int = 0  # runs whose score was no number at some step
    share: bool = False  # the score lies between 0 and 1, and so does an interval of its mean

    def values(self, name: str) -> np.ndarray:
        """One measure over the runs that have it."""
        measured = [getattr(run, name) for run in self.runs]
        return np.array([value for value in measured if not math.isnan(value)])

    def mean(self, name: str) -> float:
        values = self.values(name)
        return float(values.mean()) if len(values) else math.nan

    def student(self, name: str) -> Interval:
        interval = student_interval(self.values(name))
        if self.share and name in ("final", "area") and not math.isnan(interval.low):
            return Interval(
                mean=interval.mean, low=max(interval.low, 0.0), high=min(interval.high, 1.0)
            )
        return interval

    def bootstrap(self, name: str) -> Interval:
        return bootstrap_interval(self.values(name))

    def iqm(self, name: str) -> float:
        return interquartile_mean(self.values(name))

    def reach(self, number: int) -> ReachCost:
        """Medians over the runs; the KL is the mean of those that arrived."""
        costs = [run.reach[number] for run in self.runs]
        kls = [cost.kl for cost in costs if not math.isnan(cost.kl)]
        return ReachCost(
            target=costs[0].target if costs else math.nan,
            steps=median_reached([cost.steps for cost in costs]),
            samples=median_reached([cost.samples for cost in costs]),
            seconds=median_reached([cost.seconds for cost in costs]),
            kl=float(np.mean(kls)) if kls else math.nan,
        )

    def arrived(self, number: int) -> int:
        return sum(run.reach[number].steps < math.inf for run in self.runs)


@dataclass(frozen=True, kw_only=True)
class ArmPair:
    """Difference of arm a to arm b on the seeds they share."""

    a: str
    b: str
    measure: str  # "final" | "area"
    difference: Difference
    p_holm: float
    barred: str = ""  # reason against a verdict even where the interval excludes zero

    @property
    def winner(self) -> str:
        """The better arm where the interval excludes zero and nothing bars the claim, else ""."""
        if not self.difference.decides or self.barred:
            return ""
        return self.a if self.difference.student.mean > 0 else self.b


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Results of a comparison."""

    comparison: Comparison
    score: PickedVariant | None
    kl: PickedVariant | None
    steps: np.ndarray  # where all reported runs are compared
    interpolated: bool  # the runs share no evaluation step: values between evaluations
    differing: tuple[str, ...]  # settings that forbid a verdict, a line each with their values
    unknown: tuple[str, ...]  # arms with a run whose settings are not recorded
    targets: tuple[float, ...]
    arms: tuple[ArmResult, ...]  # the best first
    pairs: tuple[ArmPair, ...]
    notes: tuple[str, ...]

    @property
    def end(self) -> float:
        """The last step at which all reported runs are compared."""
        return float(self.steps[-1]) if len(self.steps) else math.nan

    @property
    def variant(self) -> Variant:
        return self.score.variant if self.score else Variant("no score found", ())

    @property
    def names(self) -> dict[int, str]:
        """The name of the score in each run, by its position."""
        return self.score.names if self.score else {}

    @cached_property
    def other(self) -> "Analysis | None":
        """The same by the other kind of accuracy, greedy or sampled; none where a run lacks it."""
        counted = [run for run in self.comparison.runs if run.counts]
        logged = set(self.names.values())
        name = other_accuracy(logged.pop(), counted) if len(logged) == 1 else ""
        return analyse(replace(self.comparison, score=name)) if name else None

    def result(self, arm: str) -> ArmResult:
        return next(result for result in self.arms if result.arm.name == arm)

    def pair(self, a: str, b: str, measure: str = "final") -> ArmPair | None:
        return next(
            (pair for pair in self.pairs if (pair.a, pair.b, pair.measure) == (a, b, measure)), None
        )


def analyse(comparison: Comparison) -> Analysis:
    """The results of a comparison, from its runs alone."""
    runs = comparison.runs
    score = pick_variant(SCORE, runs, wanted=comparison.score)
    kl = pick_variant(KL, runs)
    scores = {i: series(runs[i], name) for i, name in (score.names if score else {}).items()}
    used = {i: curve for i, curve in scores.items() if runs[i].counts}
    common = align_curves(used)
    whole = common.curves if len(common.steps) else {}
    targets = _targets([[whole[i] for i in whole if runs[i].name == a.name] for a in _arms(runs)])
    drift = {i: series(runs[i], name) for i, name in (kl.names if kl else {}).items()}
    measured = {i: measure_run(runs[i], curve, drift.get(i), targets) for i, curve in whole.items()}
    share = score is not None and score.variant.share
    names = score.names if score else {}
    broken = {i for i, name in names.items() if name in runs[i].broken}
    arms = [
        _arm(arm, comparison, measured, broken=broken, share=share)
        for arm in comparison.arms or _arms(runs)
    ]
    ordered = sorted(arms, key=_worth, reverse=True)
    finished = {
        result.arm.name: [run for run in runs if run.counts and run.name == result.arm.name]
        for result in arms
    }
    known = {name: distinct_settings(own) for name, own in finished.items()}
    apart = _apart([result.arm for result in ordered], known, comparison)
    logged = [(runs[i].name, names[i]) for i in whole]
    barred = {
        pair: _pair_barred(paths, {name for arm, name in logged if arm in pair}, common)
        for pair, paths in apart.items()
    }
    differing = list(dict.fromkeys(path for paths in apart.values() for path in paths))
    return Analysis(
        comparison=comparison,
        score=score,
        kl=kl,
        steps=common.steps,
        interpolated=common.interpolated,
        differing=tuple(difference_lines(known, differing)),
        unknown=tuple(
            name for name, own in finished.items() if any(_unrecorded(run) for run in own)
        ),
        targets=targets,
        arms=tuple(ordered),
        pairs=tuple(_pairs(ordered, barred, measures=_measures(common))),
        notes=(*comparison.notes, *analysis_notes(comparison, used, common, score, kl, drift)),
    )


def measure_run(
    run: Run, score: Series, drift: Series | None, targets: Sequence[float]
) -> MeasuredRun:
    """Numbers of one run; `score` is at the steps that all runs share, the last is the end."""
    steps, values = score
    end = float(steps[-1])
    spent, drawn = seconds_spent(run), samples_drawn(run)
    nothing = Series(np.empty(0), np.empty(0))
    drift = nothing if drift is None else drift
    reach = []
    for target in targets:
        at = reached(steps, values, target)
        cost = [at if math.isinf(at) else value_at(*total, at) for total in (drawn, spent)]
        reach.append(
            ReachCost(
                target=target,
                steps=at,
                samples=cost[0] if len(drawn.steps) else math.nan,
                seconds=cost[1] if len(spent.steps) else math.nan,
                kl=value_at(*drift, at),
            )
        )
    return MeasuredRun(
        run=run,
        start=float(values[0]),
        final=float(values[-1]),
        area=area(steps, values, end),
        kl=value_at(*drift, end),
        step_seconds=_pace(spent, end),
        reach=tuple(reach),
    )


def _pace(spent: Series, end: float) -> float:
    """Seconds a step up to the last timed step that is not after `end`."""
    known = (spent.steps > 0) & (spent.steps <= end)
    if not known.any():
        return math.nan
    return float(spent.values[known][-1] / spent.steps[known][-1])


def _apart(
    arms: Sequence[Arm], known: Mapping[str, Sequence[Settings]], comparison: Comparison
) -> dict[tuple[str, str], list[str]]:
    """For each pair of arms the settings that forbid a verdict between them."""
    chosen = {choice.arm: choice.settings for choice in comparison.chosen}
    return {
        (a.name, b.name): undeclared_differences(
            known[a.name], known[b.name], declared_settings(a, b, chosen)
        )
        for a, b in itertools.combinations(arms, 2)
    }


def _unrecorded(run: Run) -> bool:
    return run.source != "proxpo" or not settings_of(run)


def _pair_barred(paths: Sequence[str], names: set[str], common: CommonSteps) -> str:
    """The reason against any verdict between two arms, whatever their numbers; "" for none."""
    if paths:
        return f"their settings differ in {listed(paths)}"
    if len(names) > 1:
        return f"their score is logged under different names ({listed(sorted(names))})"
    if common.interpolated:
        return "the runs were not evaluated at the same steps"
    return ""


def _arms(runs: Sequence[Run]) -> list[Arm]:
    """Arms of runs without a plan, in order of appearance."""
    arms = {run.name: Arm(name=run.name, method=run.method, family=run.method) for run in runs}
    return list(arms.values())


def _arm(
    arm: Arm,
    comparison: Comparison,
    measured: Mapping[int, MeasuredRun],
    *,
    broken: set[int],
    share: bool,
) -> ArmResult:
    own = [(i, run) for i, run in enumerate(comparison.runs) if run.name == arm.name]
    reported = [(i, run) for i, run in own if run.role != "tune"]
    chosen = next((choice.settings for choice in comparison.chosen if choice.arm == arm.name), {})
    return ArmResult(
        arm=arm,
        settings=chosen,
        runs=tuple(measured[i] for i, _ in reported if i in measured),
        failed=sum(run.status == "failed" for _, run in reported),
        unfinished=sum(run.status in ("running", "waiting") for _, run in reported),
        broken=sum(i in broken for i, _ in reported),
        share=share,
    )


def _worth(result: ArmResult) -> tuple[float, float]:
    mean, along = result.mean("final"), result.mean("area")
    return (-math.inf if math.isnan(mean) else mean, -math.inf if math.isnan(along) else along)


def _measures(common: CommonSteps) -> tuple[str, ...]:
    """Measures that pairs are tested in; a mean over training needs a step between its ends."""
    return ("final", "area") if len(common.steps) > 2 else ("final",)


def _pairs(
    arms: Sequence[ArmResult],
    barred: Mapping[tuple[str, str], str],
    *,
    measures: Sequence[str],
) -> list[ArmPair]:
    """Every pair, the better-ranked arm first."""
    pairs: list[ArmPair] = []
    for measure_name in measures:
        both = [
            (a, b, paired_difference(a, b, measure_name))
            for a, b in itertools.combinations(arms, 2)
        ]
        corrected = holm([difference.p for _, _, difference in both])
        pairs += [
            ArmPair(
                a=a.arm.name,
                b=b.arm.name,
                measure=measure_name,
                difference=difference,
                p_holm=p,
                barred=barred[a.arm.name, b.arm.name]
                or _barred(a if difference.student.mean > 0 else b),
            )
            for (a, b, difference), p in zip(both, corrected)
        ]
    return pairs


def paired_difference(a: ArmResult, b: ArmResult, name: str) -> Difference:
    """Difference of one measure between two arms, paired over the seeds that both finished."""
    left, right = _by_seed(a, name), _by_seed(b, name)
    seeds = sorted(left.keys() & right.keys())
    return paired(np.array([left[s] for s in seeds]), np.array([right[s] for s in seeds]))


def _by_seed(result: ArmResult, name: str) -> dict[int, float]:
    return {
        measured.run.seed: getattr(measured, name)
        for measured in result.runs
        if measured.run.seed is not None and not math.isnan(getattr(measured, name))
    }


def _barred(winner: ArmResult) -> str:
    """The reason against a verdict for an arm that lost runs: its mean is over survivors alone."""
    total = len(winner.runs) + winner.failed + winner.unfinished
    if winner.failed:
        return f"{winner.failed} of {total} runs of {winner.arm.name} failed"
    if winner.unfinished:
        return f"{winner.unfinished} of {total} runs of {winner.arm.name} have not finished"
    if winner.broken:
        return f"the score of {winner.broken} of {total} runs of {winner.arm.name} was no number"
    return ""


def _targets(arms: Sequence[Sequence[Series]]) -> tuple[float, ...]:
    """The two scores whose cost is reported: one that every arm reaches, one near the best.

    The first is the highest that half the runs of every arm reach, the second nine tenths of the
    way from the start to the highest that half the runs of some arm reach.
    """
    tops = [float(np.median([curve.values.max() for curve in arm])) for arm in arms if arm]
    starts = [float(curve.values[0]) for arm in arms for curve in arm]
    if not tops:
        return ()
    start = float(np.mean(starts))
    wanted = [min(tops), start + 0.9 * (max(tops) - start)]
    rounded = [_below(score) for score in wanted]
    return tuple(sorted({score for score in rounded if score > start}))


def _below(value: float) -> float:
    """Rounded down to a hundredth, so that a target reads well and is still reached."""
    return math.floor(value * 100 + 1e-9) / 100


__all__ = [
    "Analysis",
    "ArmPair",
    "ArmResult",
    "MeasuredRun",
    "ReachCost",
    "analyse",
    "measure_run",
    "paired_difference",
]
