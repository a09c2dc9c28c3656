"""Runs of a plan, as many at a time as the pool takes, until none is left to make.

What has happened is read from the files of the runs and from nothing else. So a comparison that was
killed and is started again goes on where it was, and its report is that of an uninterrupted one.
"""

import fcntl
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from proxpo.compare.design import command, swept_settings, with_choices
from proxpo.compare.naming import setting_key
from proxpo.compare.plan import PLAN, Choice, Plan, PlannedRun, differences, read_plan, write_plan
from proxpo.compare.state import FAILURE, LOG, State, last_words, state_of, write_failure
from proxpo.errors import ProxpoError

LOCK = ".lock"
TICK = 0.5  # seconds between looks at the runs
GRACE = 60.0  # seconds a run has to finish its step and save when the comparison is stopped


@runtime_checkable
class Pool(Protocol):
    """Where runs are made: this machine or a cluster."""

    threads: int

    @property
    def room(self) -> int: ...
    def start(self, name: str, argv: Sequence[str], folder: Path) -> None: ...
    def finished(self, timeout: float) -> list[tuple[str, str]]: ...
    def stop(self, *, grace: float) -> None: ...


@runtime_checkable
class Watch(Protocol):
    """Who is told: of every change of a run, and now and then of all of them."""

    def changed(self, run: PlannedRun, state: State) -> None: ...
    def tick(self, plan: Plan, states: Mapping[str, State]) -> None: ...


@contextmanager
def opened(folder: Path, plan: Plan | None) -> Iterator[Plan]:
    """The folder's plan, new or as it was left, with nobody else at work in the folder."""
    if plan is None or (folder / PLAN).exists():
        before = read_plan(folder)
        other = differences(before, plan) if plan is not None else []
        if other:
            raise ProxpoError(
                f"{folder} holds another comparison ({'; '.join(other[:3])}"
                f"{'; ...' if len(other) > 3 else ''}): choose another --out"
            )
        plan = before
    elif folder.exists() and (not folder.is_dir() or set(os.listdir(folder)) - {LOCK}):
        raise ProxpoError(
            f"{folder} is there already and holds no comparison: choose another --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ProxpoError(
                f"{folder}: another comparison is at work here (process {lock.read().strip()})"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        write_plan(plan, folder)
        yield plan


def run_plan(
    plan: Plan, folder: Path, pool: Pool, *, watch: Watch, retry_failed: bool = False
) -> Plan:
    """Make every run that is not finished; with a sweep choose in between. The completed plan."""
    with _stopping(pool):
        first = [run for run in plan.runs if run.role != "report"]
        _make(plan, first, folder, pool, watch, retry_failed)
        if plan.sweep:
            plan = with_choices(plan, choose(plan, folder))
            write_plan(plan, folder)
            later = [run for run in plan.runs if run.role == "report"]
            _make(plan, later, folder, pool, watch, retry_failed)
    return plan


def choose(plan: Plan, folder: Path) -> list[Choice]:
    """For every arm the setting with the best mean final score on the tuning seeds."""
    found: list[Choice] = []
    for arm in plan.arms:
        scores = []
        for swept in swept_settings(arm, plan.sweep):
            key = setting_key({**arm.varied, **swept})
            runs = [r for r in plan.runs if r.role == "tune" and r.arm == arm.name]
            states = [look(plan, r, folder) for r in runs if setting_key(r.settings) == key]
            reached = [s.score for s in states if s.status == "done" and s.score is not None]
            whole = len(reached) == len(states) and reached
            scores.append((swept, sum(reached) / len(reached) if whole else None))
        finished = [(swept, value) for swept, value in scores if value is not None]
        if finished:
            best = max(finished, key=lambda one: one[1])[0]  # the first of equals
            found.append(Choice(arm=arm.name, settings=best, scores=tuple(scores)))
    return found


def look(plan: Plan, run: PlannedRun, folder: Path) -> State:
    """The state of one run of the plan."""
    return state_of(folder / run.folder, steps=run.steps, score=plan.score)


def _make(
    plan: Plan,
    runs: Sequence[PlannedRun],
    folder: Path,
    pool: Pool,
    watch: Watch,
    retry_failed: bool,
) -> None:
    states = {run.id: look(plan, run, folder) for run in plan.runs}
    over = ("done",) if retry_failed else ("done", "failed")
    waiting = [run for run in runs if states[run.id].status not in over]
    active: dict[str, PlannedRun] = {}
    while waiting or active:
        while waiting and pool.room:
            run = waiting.pop(0)
            _start(plan, run, folder, pool)
            active[run.id] = run
            states[run.id] = State(status="running", step=states[run.id].step)
            watch.changed(run, states[run.id])
        for name, ending in pool.finished(TICK):
            run = active.pop(name)
            states[name] = _settled(plan, run, folder, ending)
            watch.changed(run, states[name])
        for name, run in active.items():
            state = look(plan, run, folder)
            states[name] = State(status="running", step=state.step, score=state.score, kl=state.kl)
        watch.tick(plan, states)


def _start(plan: Plan, run: PlannedRun, folder: Path, pool: Pool) -> None:
    place = folder / run.folder
    place.mkdir(parents=True, exist_ok=True)
    (place / FAILURE).unlink(missing_ok=True)
    argv = command(plan, run, folder)
    line = f"OMP_NUM_THREADS={pool.threads} proxpo {shlex.join(argv)}\n"
    (place / "command.txt").write_text(line)
    pool.start(run.id, argv, place)


def _settled(plan: Plan, run: PlannedRun, folder: Path, ending: str) -> State:
    """How a run that has ended stands; one that says nothing of its failure is spoken for."""
    state = look(plan, run, folder)
    if state.status in ("done", "failed"):
        return state
    place = folder / run.folder
    reason = ending or last_words(place / LOG) or "ended without a word"
    write_failure(place, reason, kind="killed" if ending else "ended", step=state.step)
    return look(plan, run, folder)


@contextmanager
def _stopping(pool: Pool) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the runs, which save; nothing is left running, whatever happens."""

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


__all__ = ["Pool", "Watch", "choose", "look", "opened", "run_plan"]
