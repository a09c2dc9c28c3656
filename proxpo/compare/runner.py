"""Makes the runs of a plan, as many at a time as the pool takes.

The state of a run is read from its files and from nothing else. So a comparison that was killed and
is started again continues, and its report is that of an uninterrupted one.
"""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from proxpo.compare.design import command, repeating_command, with_more_arms
from proxpo.compare.plan import PLAN, Plan, PlannedRun, plan_differences, read_plan, write_plan
from proxpo.compare.state import LOG, RunState, last_line, planned_state
from proxpo.compare.tuning import grown
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
    """Makes every run that is not finished, and those that follow from them. The completed plan."""
    with _stopping(pool):
        return _Work(plan, folder, pool, display, retry_failed=retry_failed).make_all()


class _Work:
    """The runs of a plan under way: those that wait, those that are made, the states of all."""

    def __init__(
        self, plan: Plan, folder: Path, pool: Pool, display: Display, *, retry_failed: bool
    ) -> None:
        self.plan, self.folder, self.pool, self.display = plan, folder, pool, display
        self.over = ("done",) if retry_failed else ("done", "failed")
        self.states: dict[str, RunState] = {}
        self.waiting: list[PlannedRun] = []
        self.active: dict[str, PlannedRun] = {}
        self._take(plan)

    def make_all(self) -> Plan:
        self._grow()
        while self.waiting or self.active:
            self._start_waiting()
            if self._ended():
                self._grow()
            for name, run in self.active.items():
                state = planned_state(self.plan, run, self.folder)
                self.states[name] = replace(state, status="running", reason="")
            self.display.tick(self.plan, self.states)
        return self.plan

    def _start_waiting(self) -> None:
        while self.waiting and self.pool.room:
            run = self.waiting.pop(0)
            _start(self.plan, run, self.folder, self.pool)
            self.active[run.id] = run
            self.states[run.id] = RunState(status="running", step=self.states[run.id].step)
            self.display.changed(run, self.states[run.id])

    def _ended(self) -> bool:
        """Takes note of the runs that have ended; True if there were any."""
        ended = self.pool.finished(TICK)
        for name, ending in ended:
            run = self.active.pop(name)
            self.states[name] = _final_state(self.plan, run, self.folder, ending)
            self.display.changed(run, self.states[name])
        return bool(ended)

    def _grow(self) -> None:
        unfinished = {run.id for run in self.waiting} | self.active.keys()
        plan = grown(self.plan, self.folder, unfinished)
        if plan != self.plan:
            write_plan(plan, self.folder)
            self._take(plan)

    def _take(self, plan: Plan) -> None:
        """Replaces the plan by one that holds all runs being made; runs new to it wait."""
        self.plan, before = plan, self.states
        self.states = {
            run.id: before.get(run.id) or planned_state(plan, run, self.folder) for run in plan.runs
        }
        self.waiting = [run for run in self.waiting if run in plan.runs]
        new = [run for run in plan.runs if run.id not in before]
        self.waiting += [run for run in new if self.states[run.id].status not in self.over]
        self.waiting.sort(key=lambda run: _round(plan, run), reverse=True)


def _round(plan: Plan, run: PlannedRun) -> int:
    """0 for tuning, 1 for the tuning of the settings that went on, 2 for the report seeds.

    Later rounds go first: a comparison that is stopped has whole arms rather than parts of all.
    """
    if run.role == "tune":
        return int(plan.tune_best is not None and run.seed != plan.seeds.tune[0])
    return 2


def _start(plan: Plan, run: PlannedRun, folder: Path, pool: Pool) -> None:
    place = folder / run.folder
    place.mkdir(parents=True, exist_ok=True)
    (place / FAILURE).unlink(missing_ok=True)
    argv = command(plan, run, folder)
    again = shlex.join(repeating_command(plan, run))
    line = f"OMP_NUM_THREADS={pool.threads} proxpo {again}\n"
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
    "locked",
    "open_comparison",
    "run_plan",
]
