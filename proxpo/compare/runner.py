"""Makes the runs of a plan, as many at a time as the pool takes.

The state of a run is read from its files and from nothing else. So a comparison that was killed and
is started again continues, and its report is that of an uninterrupted one.
"""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from proxpo.compare.design import command, swept_settings, with_choices, with_more_arms
from proxpo.compare.naming import setting_key
from proxpo.compare.plan import (
    PLAN,
    Choice,
    Plan,
    PlannedRun,
    plan_differences,
    read_plan,
    write_plan,
)
from proxpo.compare.state import LOG, RunState, last_line, state_of
from proxpo.errors import ProxpoError
from proxpo.runs.lock import LOCK, InUse, exclusive
from proxpo.runs.status import FAILURE, write_failure

TICK = 0.5  # seconds between readings of the runs' files
GRACE = 60.0  # seconds a run has to finish its step and save when the comparison is stopped


@runtime_checkable
class Pool(Protocol):
    """Makes runs, on this machine or on a cluster."""

    threads: int

    @property
    def room(self) -> int: ...
    def start(self, name: str, argv: Sequence[str], folder: Path) -> None: ...
    def finished(self, timeout: float) -> list[tuple[str, str]]: ...
    def stop(self, *, grace: float) -> None: ...


@runtime_checkable
class Display(Protocol):
    """Shows a comparison: `changed` on every change of a run, `tick` twice a second."""

    def changed(self, run: PlannedRun, state: RunState) -> None: ...
    def tick(self, plan: Plan, states: Mapping[str, RunState]) -> None: ...


@contextmanager
def open_comparison(folder: Path, plan: Plan | None) -> Iterator[Plan]:
    """Locks the folder and yields its plan: the one stored there, else `plan`, which is stored.

    A plan that only adds arms to the stored one replaces it. Refused where the folder holds another
    plan than `plan` or something else.
    """
    if plan is None or (folder / PLAN).exists():
        stored = read_plan(folder)
        changes = plan_differences(stored, plan) if plan is not None else []
        longer = with_more_arms(stored, plan) if plan is not None and changes else None
        if changes and longer is None:
            raise ProxpoError(
                f"{folder} holds another comparison ({'; '.join(changes[:3])}"
                f"{'; ...' if len(changes) > 3 else ''}): choose another --out"
            )
        plan = longer or stored
    elif folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {LOCK}):
        raise ProxpoError(
            f"{folder} is there already and holds no comparison: choose another --out"
        )
    with locked(folder):
        write_plan(plan, folder)
        yield plan


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; refused where another comparison holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(folder / LOCK))
        except InUse as owner:
            raise ProxpoError(f"{folder}: another comparison is at work here ({owner})") from None
        yield


def run_plan(
    plan: Plan, folder: Path, pool: Pool, *, display: Display, retry_failed: bool = False
) -> Plan:
    """Makes every run that is not finished; with a sweep chooses in between. The completed plan."""
    with _stopping(pool):
        first = [run for run in plan.runs if run.role != "report"]
        _make(plan, first, folder, pool, display, retry_failed)
        if plan.sweep:
            plan = with_choices(plan, choose_settings(plan, folder))
            write_plan(plan, folder)
            later = [run for run in plan.runs if run.role == "report"]
            _make(plan, later, folder, pool, display, retry_failed)
    return plan


def choose_settings(plan: Plan, folder: Path) -> list[Choice]:
    """For every arm the setting with the best mean final score on the tuning seeds."""
    choices: list[Choice] = []
    for arm in plan.arms:
        scores = []
        for swept in swept_settings(arm, plan.sweep):
            key = setting_key({**arm.varied, **swept})
            runs = [r for r in plan.runs if r.role == "tune" and r.arm == arm.name]
            states = [
                planned_state(plan, r, folder) for r in runs if setting_key(r.settings) == key
            ]
            reached = [s.score for s in states if s.status == "done" and s.score is not None]
            whole = len(reached) == len(states) and reached
            scores.append((swept, sum(reached) / len(reached) if whole else None))
        finished = [(swept, value) for swept, value in scores if value is not None]
        if finished:
            best = max(finished, key=lambda pair: pair[1])[0]  # the first of equals
            choices.append(Choice(arm=arm.name, settings=best, scores=tuple(scores)))
    return choices


def planned_state(plan: Plan, run: PlannedRun, folder: Path) -> RunState:
    """The state of one run of the plan."""
    return state_of(folder / run.folder, steps=run.steps, score=plan.score)


def _make(
    plan: Plan,
    runs: Sequence[PlannedRun],
    folder: Path,
    pool: Pool,
    display: Display,
    retry_failed: bool,
) -> None:
    states = {run.id: planned_state(plan, run, folder) for run in plan.runs}
    over = ("done",) if retry_failed else ("done", "failed")
    waiting = [run for run in runs if states[run.id].status not in over]
    active: dict[str, PlannedRun] = {}
    while waiting or active:
        while waiting and pool.room:
            run = waiting.pop(0)
            _start(plan, run, folder, pool)
            active[run.id] = run
            states[run.id] = RunState(status="running", step=states[run.id].step)
            display.changed(run, states[run.id])
        for name, ending in pool.finished(TICK):
            run = active.pop(name)
            states[name] = _final_state(plan, run, folder, ending)
            display.changed(run, states[name])
        for name, run in active.items():
            state = planned_state(plan, run, folder)
            states[name] = RunState(
                status="running", step=state.step, score=state.score, kl=state.kl
            )
        display.tick(plan, states)


def _start(plan: Plan, run: PlannedRun, folder: Path, pool: Pool) -> None:
    place = folder / run.folder
    place.mkdir(parents=True, exist_ok=True)
    (place / FAILURE).unlink(missing_ok=True)
    argv = command(plan, run, folder)
    line = f"OMP_NUM_THREADS={pool.threads} proxpo {shlex.join(argv)}\n"
    (place / "command.txt").write_text(line)
    pool.start(run.id, argv, place)


def _final_state(plan: Plan, run: PlannedRun, folder: Path, ending: str) -> RunState:
    """Final state of a run; writes failure.json if the run did not."""
    state = planned_state(plan, run, folder)
    if state.status in ("done", "failed"):
        return state
    place = folder / run.folder
    reason = ending or last_line(place / LOG) or "ended without a message"
    kind = "killed" if ending else "ended"
    write_failure(place, reason=reason, step=state.step, phase="", kind=kind)
    return planned_state(plan, run, folder)


@contextmanager
def _stopping(pool: Pool) -> Iterator[None]:
    """Stops the runs, which save, on Ctrl-C and SIGTERM; no run outlives the block."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
        grace = 0.0
    except BaseException as error:
        grace = GRACE if isinstance(error, KeyboardInterrupt) else 0.0
        raise
    finally:
        pool.stop(grace=grace)
        signal.signal(signal.SIGTERM, before)


__all__ = [
    "Display",
    "Pool",
    "choose_settings",
    "locked",
    "open_comparison",
    "planned_state",
    "run_plan",
]
