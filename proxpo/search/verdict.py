"""Claims on the finalists of a search, from seeds that no choice has seen.

A finalist is said to beat the named methods on a task if its paired difference to every one of them
is positive and p < 0.05 after Holm's correction, where

    p = max over named methods of the paired Student p, two-sided

The maximum needs no correction (to beat all, each must be beaten); Holm's is over the finalists.
Fresh seeds make each estimate unbiased by the choice of the finalists.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from proxpo.compare.plan import Plan, read_plan
from proxpo.compare.state import planned_state
from proxpo.report.statistics import Difference, Interval, holm, paired, student_interval

LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """An arm of a confirmation: final score over seeds, and KL."""

    arm: str
    score: Interval
    kl: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A finalist against each named method on one task; p is corrected over the finalists."""

    finalist: str
    against: tuple[tuple[str, Difference], ...]
    p: float

    @property
    def beats(self) -> bool:
        """True if the finalist is shown to be above every named method."""
        ahead = all(d.student.mean > 0 and d.decides for _, d in self.against)
        return bool(self.against) and ahead and self.p < LEVEL

    @property
    def closest(self) -> tuple[str, Difference]:
        """The named method with the smallest difference."""
        return min(self.against, key=lambda pair: pair[1].student.mean)


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """All arms of a confirmation, the best first, and a verdict on each finalist."""

    plan: Plan
    arms: tuple[Confirmed, ...]
    verdicts: tuple[Verdict, ...]


def judge(folder: Path, finalists: Sequence[str]) -> Confirmation:
    """The confirmation in `folder`; arms that are no finalists are named methods."""
    plan = read_plan(folder)
    scores: dict[str, dict[int, float]] = {arm.name: {} for arm in plan.arms}
    drifts: dict[str, list[float]] = {arm.name: [] for arm in plan.arms}
    for run in plan.runs:
        state = planned_state(plan, run, folder)
        if state.status == "done" and state.score is not None:
            scores[run.arm][run.seed] = state.score
            drifts[run.arm] += [] if state.kl is None else [state.kl]
    named = [name for name in scores if name not in finalists]
    verdicts = [_verdict(name, named, scores, len(plan.seeds.report)) for name in finalists]
    corrected = holm([verdict.p for verdict in verdicts])
    arms = [
        Confirmed(
            arm=name,
            score=student_interval(np.array(list(values.values()))),
            kl=float(np.mean(drifts[name])) if drifts[name] else math.nan,
            seeds=len(values),
        )
        for name, values in scores.items()
    ]
    return Confirmation(
        plan=plan,
        arms=tuple(sorted(arms, key=lambda arm: -_or_lowest(arm.score.mean))),
        verdicts=tuple(replace(v, p=p) for v, p in zip(verdicts, corrected)),
    )


def winner(task: Confirmation, unseen: Confirmation) -> str | None:
    """The best finalist that beats the named methods on the task of the search and holds elsewhere.

    To hold on the unseen task is not to be below any named method there, by its interval.
    """
    behind = {
        verdict.finalist
        for verdict in unseen.verdicts
        if any(d.decides and d.student.mean < 0 for _, d in verdict.against)
    }
    beating = {v.finalist for v in task.verdicts if v.beats and v.finalist not in behind}
    return next((arm.arm for arm in task.arms if arm.arm in beating), None)


def _verdict(
    finalist: str, named: Sequence[str], scores: dict[str, dict[int, float]], seeds: int
) -> Verdict:
    """The verdict before correction; a missing run leaves nothing to be shown (p = 1)."""
    against, p = [], 0.0
    for name in named:
        common = sorted(scores[finalist].keys() & scores[name].keys())
        pair = [np.array([scores[arm][seed] for seed in common]) for arm in (finalist, name)]
        difference = paired(*pair)
        against.append((name, difference))
        shown = len(common) == seeds and not math.isnan(difference.p)
        p = max(p, difference.p if shown and difference.student.mean > 0 else 1.0)
    return Verdict(finalist=finalist, against=tuple(against), p=p)


def _or_lowest(value: float) -> float:
    return -math.inf if math.isnan(value) else value


__all__ = ["Confirmation", "Confirmed", "Verdict", "judge", "winner"]
