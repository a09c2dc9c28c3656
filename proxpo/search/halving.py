"""Successive halving: brackets of arms, run rung by rung; then the finalists on fresh seeds.

Every rung is a comparison in a folder of its own, made by the runner of `proxpo compare`. All that
a search knows of a bracket is read from these folders, so a search that was killed goes on where it
was.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proxpo.compare.design import first_runs
from proxpo.compare.plan import PLAN, Arm, Plan, Seeds, check_runs, read_plan
from proxpo.compare.runner import Display, Pool, open_comparison, run_plan
from proxpo.compare.state import planned_state
from proxpo.errors import ProxpoError
from proxpo.report.text import plural
from proxpo.search.plan import SearchPlan, SearchState, kept, write_search
from proxpo.search.proposals import Proposal, propose, replay
from proxpo.search.space import METHOD, Space

Show = Callable[[str], AbstractContextManager[Display]]  # a display under a heading


@dataclass(frozen=True, kw_only=True)
class Result:
    """An arm after the last rung it was run in: mean score and KL over the rung's seeds.

    score: None if a run failed or has not finished
    """

    arm: Arm
    rung: int
    steps: int
    seeds: int
    score: float | None
    kl: float | None

    @property
    def order(self) -> tuple[float, ...]:
        """Larger is better: the rung reached, the score there, the smaller KL; failures last."""
        if self.score is None:
            return (-1.0, 0.0, 0.0)
        return (float(self.rung), self.score, -(self.kl if self.kl is not None else 0.0))


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The pool that makes runs, and the display that shows them."""

    pool: Pool
    show: Show
    retry_failed: bool = False

    def run(self, plan: Plan, folder: Path, heading: str) -> None:
        with open_comparison(folder, plan) as stored, self.show(heading) as display:
            run_plan(stored, folder, self.pool, display=display, retry_failed=self.retry_failed)


def run_search(
    search: SearchPlan, state: SearchState, space: Space, folder: Path, runner: Runner
) -> SearchState:
    """Makes every run of the search that is not finished; the completed state."""
    state = _bracket_run(search, state, search.named, folder, runner, number=0)
    number = 1
    while number <= len(state.brackets) or _affordable(search, state):
        if number > len(state.brackets):
            state = _with_bracket(search, state, space, folder, number)
        arms = candidates(space, state, number)
        state = _bracket_run(search, state, arms, folder, runner, number=number)
        number += 1
    confirm(search, state, folder, runner)
    return state


def halve(search: SearchPlan, arms: Sequence[Arm], folder: Path, runner: Runner) -> None:
    """Runs the arms rung by rung, the better half of each going on.

    The arms of a rung that has begun stand, also when failed runs are repeated.
    """
    for rung, (steps, seeds) in enumerate(search.rungs):
        place = folder / f"rung-{rung}"
        if (place / PLAN).is_file():
            plan = read_plan(place)
        else:
            base = {**search.base, "train": {**search.base["train"], "steps": steps}}
            plan = _comparison(search, base, arms, seeds, title=f"{folder.name}, rung {rung}")
        size = f"{plural(len(plan.arms), 'arm')}, {plural(steps, 'step')}"
        runner.run(plan, place, f"{plan.title}: {size}, {plural(len(seeds), 'seed')}")
        going_on = [result for result in _rung_results(place, rung) if result.score is not None]
        arms = [result.arm for result in going_on[: kept(len(plan.arms))]]
        if not arms:
            return


def bracket_results(folder: Path) -> list[Result]:
    """The arms of a bracket, each after its last rung, the best first."""
    latest: dict[str, Result] = {}
    for rung, path in enumerate(sorted(folder.glob("rung-*"))):
        if (path / PLAN).is_file():
            latest |= {result.arm.name: result for result in _rung_results(path, rung)}
    return _ranked(list(latest.values()))


def best(results: Sequence[Result], search: SearchPlan, *, families: bool) -> list[Result]:
    """The finalists: the best arms that finished the last rung, with `families` one of each."""
    whole = [r for r in _ranked(results) if r.score is not None and r.rung == len(search.rungs) - 1]
    chosen: dict[str, Result] = {}
    for result in whole:
        chosen.setdefault(result.arm.family if families else result.arm.name, result)
    return list(chosen.values())[: search.finalists]


def candidates(space: Space, state: SearchState, number: int) -> list[Arm]:
    """The arms of a bracket, named by their number in the search."""
    before = sum(map(len, state.brackets[: number - 1]))
    return [
        _candidate(replay(space, choices), before + i + 1)
        for i, choices in enumerate(state.brackets[number - 1])
    ]


def bracket(folder: Path, number: int) -> Path:
    """Folder of a bracket of candidates, counted from 1."""
    return folder / f"bracket-{number:02d}"


def tried(state: SearchState, folder: Path) -> list[Result]:
    """Results of all candidates, the best first."""
    numbers = range(1, len(state.brackets) + 1)
    return _ranked([r for number in numbers for r in bracket_results(bracket(folder, number))])


def confirmations(state: SearchState, folder: Path) -> dict[str, Path]:
    """Folders of the confirmation: on the task of the search, on the unseen one.

    A search that goes on with a larger budget is confirmed anew.
    """
    number = f"{len(state.brackets):02d}"
    return {"confirm": folder / f"confirm-{number}", "unseen": folder / f"unseen-{number}"}


def confirm(search: SearchPlan, state: SearchState, folder: Path, runner: Runner) -> None:
    """Runs finalists and best named methods on seeds and a task that the search has not seen."""
    finalists = best(tried(state, folder), search, families=False)
    named = best(bracket_results(folder / "named"), search, families=True)
    for what, results in (("candidate", finalists), ("named method", named)):
        if not results:
            raise ProxpoError(
                f"no {what} finished the last rung: see the runs' log.txt in {folder}"
            )
    arms = [result.arm for result in (*finalists, *named)]
    note = (
        "Arms and rates were chosen on other seeds and on one task; these seeds are fresh, so that "
        "the estimates are unbiased by the choice."
    )
    for name, place in confirmations(state, folder).items():
        base = search.base if name == "confirm" else search.unseen
        task = "the task of the search" if name == "confirm" else "a task it has not seen"
        plan = _comparison(
            search, base, arms, range(search.seeds), title=f"Finalists on {task}", notes=(note,)
        )
        runner.run(
            plan,
            place,
            f"{plan.title}: {plural(len(arms), 'arm')}, {plural(search.seeds, 'fresh seed')}",
        )


def _affordable(search: SearchPlan, state: SearchState) -> bool:
    """True if the budget allows one more bracket; the first one is always made."""
    if search.brackets is not None:
        return len(state.brackets) < search.brackets
    assert search.budget.minutes is not None
    longest = max(state.seconds[1:], default=0.0)
    return not state.brackets or sum(state.seconds) + longest <= 60 * search.budget.minutes


def _with_bracket(
    search: SearchPlan, state: SearchState, space: Space, folder: Path, number: int
) -> SearchState:
    """The state with the candidates of one more bracket, stored."""
    proposals: dict[str, Proposal] = {
        arm.name: replay(space, choices)
        for n, choices_list in enumerate(state.brackets, 1)
        for arm, choices in zip(candidates(space, state, n), choices_list)
    }
    earlier = [proposals[result.arm.name] for result in reversed(tried(state, folder))]
    new = propose(
        space,
        search.proposer,
        search.candidates,
        seed=search.seed,
        bracket=number,
        earlier=earlier,
    )
    choices = tuple(proposal.choices for proposal in new)
    state = replace(state, brackets=(*state.brackets, choices), seconds=(*state.seconds, 0.0))
    write_search(folder, search, state)
    return state


def _bracket_run(
    search: SearchPlan,
    state: SearchState,
    arms: Sequence[Arm],
    folder: Path,
    runner: Runner,
    *,
    number: int,
) -> SearchState:
    """The state after a bracket: its seconds are added however it ends. 0: the named methods."""
    begun = time.monotonic()
    try:
        halve(search, arms, bracket(folder, number) if number else folder / "named", runner)
    finally:
        seconds = list(state.seconds)
        seconds[number] += round(time.monotonic() - begun, 1)
        state = replace(state, seconds=tuple(seconds))
        write_search(folder, search, state)
    return state


def _candidate(proposal: Proposal, number: int) -> Arm:
    # In full: `reward` alone could be the kind of stage or the setting task.reward.
    recipe = {f"recipe.{key}": value for key, value in proposal.recipe.items()}
    name = f"candidate-{number:03d}"
    return Arm(name=name, method=METHOD, settings={**recipe, **proposal.swept}, family=name)


def _comparison(
    search: SearchPlan,
    base: Mapping[str, Any],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    title: str,
    notes: tuple[str, ...] = (),
) -> Plan:
    plan = Plan(
        title=title,
        question="",
        base=base,
        arms=tuple(arms),
        seeds=Seeds(report=tuple(seeds)),
        score=search.score,
        notes=notes,
    )
    return check_runs(replace(plan, runs=tuple(first_runs(plan))))


def _rung_results(folder: Path, rung: int) -> list[Result]:
    """The arms of one rung, the best first."""
    plan = read_plan(folder)
    results = []
    for arm in plan.arms:
        runs = [run for run in plan.runs if run.arm == arm.name]
        states = [planned_state(plan, run, folder) for run in runs]
        whole = all(state.status == "done" for state in states)
        results.append(
            Result(
                arm=arm,
                rung=rung,
                steps=runs[0].steps,
                seeds=len(runs),
                score=_mean([state.score for state in states]) if whole else None,
                kl=_mean([state.kl for state in states]) if whole else None,
            )
        )
    return _ranked(results)


def _ranked(results: Sequence[Result]) -> list[Result]:
    """The best first; of equals the earlier one."""
    return sorted(results, key=lambda result: result.order, reverse=True)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


__all__ = [
    "Result",
    "Runner",
    "best",
    "bracket_results",
    "confirmations",
    "run_search",
    "tried",
]
