"""From runs to results: each arm's numbers, the paired differences, and what they allow to say."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxpo.compare.plan import Arm
from proxpo.report.quantities import (
    KL,
    SCORE,
    Picked,
    Series,
    Variant,
    clock,
    pick,
    samples,
    series,
)
from proxpo.report.runs import Comparison, Run
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
class Reach:
    """The cost of first reaching a score; infinite where it was never reached."""

    target: float
    steps: float
    samples: float
    seconds: float
    kl: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One finished, reported run in numbers, all of them within the common budget."""

    run: Run
    start: float
    final: float
    area: float
    kl: float
    step_seconds: float
    reach: tuple[Reach, ...]


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """An arm over its seeds. Failed and unfinished runs are counted, not averaged."""

    arm: Arm
    settings: Mapping[str, Any]  # the swept setting that was chosen
    runs: tuple[Measured, ...]
    failed: int
    unfinished: int
    share: bool = False  # the score lies between 0 and 1, and so does an interval of its mean

    def values(self, name: str) -> np.ndarray:
        """One measure over the runs that have it."""
        found = [getattr(one, name) for one in self.runs]
        return np.array([value for value in found if not math.isnan(value)])

    def mean(self, name: str) -> float:
        values = self.values(name)
        return float(values.mean()) if len(values) else math.nan

    def student(self, name: str) -> Interval:
        found = student_interval(self.values(name))
        if self.share and name in ("final", "area") and not math.isnan(found.low):
            return Interval(mean=found.mean, low=max(found.low, 0.0), high=min(found.high, 1.0))
        return found

    def bootstrap(self, name: str) -> Interval:
        return bootstrap_interval(self.values(name))

    def iqm(self, name: str) -> float:
        return interquartile_mean(self.values(name))

    def reach(self, number: int) -> Reach:
        """Medians over the runs; the KL is the mean of those that arrived."""
        each = [one.reach[number] for one in self.runs]
        there = [one.kl for one in each if not math.isnan(one.kl)]
        return Reach(
            target=each[0].target if each else math.nan,
            steps=median_reached([one.steps for one in each]),
            samples=median_reached([one.samples for one in each]),
            seconds=median_reached([one.seconds for one in each]),
            kl=float(np.mean(there)) if there else math.nan,
        )

    def arrived(self, number: int) -> int:
        return sum(one.reach[number].steps < math.inf for one in self.runs)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Arm a against arm b on the seeds they share."""

    a: str
    b: str
    measure: str  # "final" | "area"
    difference: Difference
    p_holm: float
    barred: str = ""  # why nothing is claimed although the interval excludes zero

    @property
    def winner(self) -> str:
        """The better arm where the interval excludes zero and nothing bars the claim, else ""."""
        if not self.difference.decides or self.barred:
            return ""
        return self.a if self.difference.student.mean > 0 else self.b


@dataclass(frozen=True, kw_only=True)
class Analysis:
    comparison: Comparison
    score: Picked | None
    kl: Picked | None
    end: float  # the step up to which all reported runs were evaluated
    targets: tuple[float, ...]
    arms: tuple[ArmResult, ...]  # the best first
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    @property
    def variant(self) -> Variant:
        return self.score.variant if self.score else Variant("no score found", ())

    @property
    def names(self) -> dict[int, str]:
        """What each run calls the score, by its position."""
        return self.score.names if self.score else {}

    def pair(self, a: str, b: str, measure: str = "final") -> Pair | None:
        return next(
            (one for one in self.pairs if (one.a, one.b, one.measure) == (a, b, measure)), None
        )


def analyse(comparison: Comparison) -> Analysis:
    """Everything the report says, from the runs alone."""
    runs = comparison.runs
    score = pick(SCORE, runs, wanted=comparison.score)
    kl = pick(KL, runs)
    scores = {i: series(runs[i], name) for i, name in (score.names if score else {}).items()}
    used = [i for i, run in enumerate(runs) if _counts(run) and i in scores]
    end = min((scores[i].steps[-1] for i in used), default=math.nan)
    within = {i: Series(*(part[scores[i].steps <= end] for part in scores[i])) for i in used}
    targets = _targets([[within[i] for i in used if runs[i].name == a.name] for a in _arms(runs)])
    drift = {i: series(runs[i], name) for i, name in (kl.names if kl else {}).items()}
    measured = {i: measure(runs[i], scores[i], drift.get(i), end, targets) for i in used}
    share = score is not None and score.variant.share
    arms = [_arm(arm, comparison, measured, share=share) for arm in comparison.arms or _arms(runs)]
    ordered = sorted(arms, key=_worth, reverse=True)
    return Analysis(
        comparison=comparison,
        score=score,
        kl=kl,
        end=end,
        targets=targets,
        arms=tuple(ordered),
        pairs=tuple(_pairs(ordered)),
        notes=(*comparison.notes, *_notes(comparison, scores, used, end, score)),
    )


def measure(
    run: Run, score: Series, drift: Series | None, end: float, targets: Sequence[float]
) -> Measured:
    """A run in numbers, cut at step `end`."""
    inside = score.steps <= end
    steps, values = score.steps[inside], score.values[inside]
    spent, drawn = clock(run), samples(run)
    nothing = Series(np.empty(0), np.empty(0))
    drift = nothing if drift is None else drift
    known = drift.steps <= end
    reach = []
    for target in targets:
        at = reached(steps, values, target)
        cost = [at if math.isinf(at) else value_at(*one, at) for one in (drawn, spent)]
        reach.append(
            Reach(
                target=target,
                steps=at,
                samples=cost[0] if len(drawn.steps) else math.nan,
                seconds=cost[1] if len(spent.steps) else math.nan,
                kl=value_at(*drift, at),
            )
        )
    return Measured(
        run=run,
        start=float(values[0]),
        final=float(values[-1]),
        area=area(score.steps, score.values, end),
        kl=float(drift.values[known][-1]) if known.any() else math.nan,
        step_seconds=float(spent.values[-1] / spent.steps[-1]) if len(spent.steps) else math.nan,
        reach=tuple(reach),
    )


def _counts(run: Run) -> bool:
    return run.status == "done" and run.role != "tune"


def _arms(runs: Sequence[Run]) -> list[Arm]:
    """Arms of runs without a plan, in order of appearance."""
    found = {run.name: Arm(name=run.name, method=run.method, family=run.method) for run in runs}
    return list(found.values())


def _arm(
    arm: Arm, comparison: Comparison, measured: Mapping[int, Measured], *, share: bool
) -> ArmResult:
    own = [(i, run) for i, run in enumerate(comparison.runs) if run.name == arm.name]
    reported = [(i, run) for i, run in own if run.role != "tune"]
    chosen = next((one.settings for one in comparison.chosen if one.arm == arm.name), {})
    return ArmResult(
        arm=arm,
        settings=chosen,
        runs=tuple(measured[i] for i, _ in reported if i in measured),
        failed=sum(run.status == "failed" for _, run in reported),
        unfinished=sum(run.status in ("running", "waiting") for _, run in reported),
        share=share,
    )


def _worth(result: ArmResult) -> tuple[float, float]:
    mean, along = result.mean("final"), result.mean("area")
    return (-math.inf if math.isnan(mean) else mean, -math.inf if math.isnan(along) else along)


def _pairs(arms: Sequence[ArmResult]) -> list[Pair]:
    """Every pair, the better-ranked arm first."""
    found: list[Pair] = []
    for measure_name in ("final", "area"):
        both = [(a, b, compare(a, b, measure_name)) for a, b in itertools.combinations(arms, 2)]
        corrected = holm([difference.p for _, _, difference in both])
        found += [
            Pair(
                a=a.arm.name,
                b=b.arm.name,
                measure=measure_name,
                difference=difference,
                p_holm=p,
                barred=_barred(a if difference.student.mean > 0 else b),
            )
            for (a, b, difference), p in zip(both, corrected)
        ]
    return found


def compare(a: ArmResult, b: ArmResult, name: str) -> Difference:
    """Paired over the seeds that both finished."""
    left, right = _by_seed(a, name), _by_seed(b, name)
    seeds = sorted(left.keys() & right.keys())
    return paired(np.array([left[s] for s in seeds]), np.array([right[s] for s in seeds]))


def _by_seed(result: ArmResult, name: str) -> dict[int, float]:
    return {
        one.run.seed: getattr(one, name)
        for one in result.runs
        if one.run.seed is not None and not math.isnan(getattr(one, name))
    }


def _barred(winner: ArmResult) -> str:
    """An arm that lost runs is averaged over its survivors, which flatters it."""
    total = len(winner.runs) + winner.failed + winner.unfinished
    if winner.failed:
        return f"{winner.failed} of {total} runs of {winner.arm.name} failed"
    if winner.unfinished:
        return f"{winner.unfinished} of {total} runs of {winner.arm.name} have not finished"
    return ""


def _targets(arms: Sequence[Sequence[Series]]) -> tuple[float, ...]:
    """Scores whose cost is worth knowing: one that every arm reaches, one near the best.

    The first is the highest that half the runs of every arm reach, the second nine tenths of the
    way from the start to the highest that half the runs of some arm reach.
    """
    tops = [float(np.median([one.values.max() for one in arm])) for arm in arms if arm]
    starts = [float(one.values[0]) for arm in arms for one in arm]
    if not tops:
        return ()
    start = float(np.mean(starts))
    wanted = [min(tops), start + 0.9 * (max(tops) - start)]
    rounded = [_below(one) for one in wanted]
    return tuple(sorted({one for one in rounded if one > start}))


def _below(value: float) -> float:
    """Rounded down to a hundredth, so that a target reads well and is still reached."""
    return math.floor(value * 100 + 1e-9) / 100


def _notes(
    comparison: Comparison,
    scores: Mapping[int, Series],
    used: Sequence[int],
    end: float,
    score: Picked | None,
) -> list[str]:
    notes: list[str] = []
    runs = comparison.runs
    done = [i for i, run in enumerate(runs) if _counts(run)]
    if score is None:
        return ["No run holds a score: nothing can be ranked."]
    without = [runs[i].folder for i in done if i not in scores]
    if without:
        notes.append(f"No '{score.variant.label}' in {_listed(without)}: left out of the ranking.")
    if len({scores[i].steps[-1] for i in used}) > 1:
        notes.append(
            f"Runs end at different steps; they are compared at step {end:g}, which all reached."
        )
    names = {score.names[i] for i in used}
    if len(names) > 1:
        notes.append(f"The score is logged under different names: {_listed(sorted(names))}.")
    unseeded = [runs[i].folder for i in used if runs[i].seed is None]
    if unseeded:
        notes.append(f"No seed is known for {_listed(unseeded)}: they cannot be paired.")
    return notes


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


__all__ = ["Analysis", "ArmResult", "Measured", "Pair", "Reach", "analyse", "compare", "measure"]
