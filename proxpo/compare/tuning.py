"""Choices of a comparison with a sweep, and the runs that follow from them, from files alone."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.compare.arms import swept_settings
from proxpo.compare.design import with_choices, with_tuned_on
from proxpo.compare.naming import setting_key
from proxpo.compare.plan import Arm, Choice, Plan, PlannedRun
from proxpo.compare.state import planned_state
from proxpo.errors import ProxpoError


def grown(plan: Plan, folder: Path, unfinished: Collection[str]) -> Plan:
    """The plan with the runs that follow from the finished ones, arm by arm.

    When an arm has been run with all settings on the first tuning seed, its best ones go on to the
    others; when its tuning is over, the best of all goes to the report seeds.

    unfinished: ids of runs that are being made or made again
    """

    def is_over(run: PlannedRun) -> bool:
        ended = planned_state(plan, run, folder).status in ("done", "failed")
        return ended and run.id not in unfinished

    def tuned(arm: Arm, seeds: Collection[int]) -> bool:
        own = [run for run in plan.runs if run.arm == arm.name and run.role == "tune"]
        return all(is_over(run) for run in own if run.seed in seeds)

    if not plan.sweep:
        return plan
    first, number = plan.seeds.tune[:1], plan.tune_best
    if number is not None:
        ready = [arm for arm in plan.arms if tuned(arm, first)]
        plan = with_tuned_on(plan, {arm.name: _best(plan, arm, folder, number) for arm in ready})
    arms = [arm.name for arm in plan.arms if tuned(arm, plan.seeds.tune)]
    return with_choices(plan, choose_settings(plan, folder, arms=arms))


def choose_settings(
    plan: Plan, folder: Path, *, arms: Collection[str] | None = None
) -> list[Choice]:
    """For every arm, or these, the setting with the best mean final score on the tuning seeds.

    Settings that went on after the first seed come before those that did not.
    """
    choices: list[Choice] = []
    for arm in plan.arms if arms is None else map(plan.arm, arms):
        tried = _tried(plan, arm, folder)
        finished = [one for one in tried if one.score is not None]
        if not finished:
            _refuse_unknown_score(plan, arm, folder)
        else:
            best = max(finished, key=lambda one: (one.seeds, one.score))  # the first of equals
            scores = tuple((one.settings, one.score) for one in tried)
            choices.append(Choice(arm=arm.name, settings=best.settings, scores=scores))
    return choices


def _refuse_unknown_score(plan: Plan, arm: Arm, folder: Path) -> None:
    """Refuses a score that runs which ended well have not logged: nothing could be chosen by it."""
    states = [planned_state(plan, run, folder) for run in plan.runs if run.arm == arm.name]
    done = [state for state in states if state.status == "done"]
    if done and all(state.score is None for state in done):
        raise ProxpoError(
            f"no run of {arm.name} has logged {plan.score}, so that no setting can be chosen by "
            "it: name another score in the study"
        )


def _best(plan: Plan, arm: Arm, folder: Path, number: int) -> list[dict[str, Any]]:
    """The settings of an arm with the best scores on the first tuning seed, in their own order."""
    first = replace(plan, runs=tuple(run for run in plan.runs if run.seed == plan.seeds.tune[0]))
    tried = [(one.score, one.settings) for one in _tried(first, arm, folder)]
    finished = [(score, settings) for score, settings in tried if score is not None]
    best = sorted(finished, key=lambda pair: pair[0], reverse=True)[:number]
    return [settings for score, settings in finished if (score, settings) in best]


class _Tried(NamedTuple):
    """A swept setting of an arm: its mean final score, None if a run failed, and its seeds."""

    settings: dict[str, Any]
    score: float | None
    seeds: int


def _tried(plan: Plan, arm: Arm, folder: Path) -> list[_Tried]:
    tried: list[_Tried] = []
    runs = [run for run in plan.runs if run.role == "tune" and run.arm == arm.name]
    for swept in swept_settings(arm, plan.sweep):
        key = setting_key({**arm.varied, **swept})
        own = [run for run in runs if setting_key(run.settings) == key]
        states = [planned_state(plan, run, folder) for run in own]
        reached = [s.score for s in states if s.status == "done" and s.score is not None]
        whole = len(reached) == len(states) and reached
        tried.append(_Tried(swept, sum(reached) / len(reached) if whole else None, len(states)))
    return tried


__all__ = ["choose_settings", "grown"]
