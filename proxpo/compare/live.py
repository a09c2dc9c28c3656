"""Display of a comparison that runs: a live table, or plain lines where there is no terminal."""

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from proxpo.compare.plan import Plan, PlannedRun
from proxpo.compare.state import RunState
from proxpo.report.text import plural

ORDER = ("running", "failed", "done", "waiting")
STYLE = {"running": "cyan", "failed": "red", "done": "green", "waiting": "dim"}
OVERVIEW_EVERY = 60.0  # seconds, where there is no terminal


class LiveTable:
    """A table of runs, the running ones first, as many as the terminal has room for."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._speed = Speed()

    def __enter__(self) -> "LiveTable":
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, at)

    def changed(self, run: PlannedRun, state: RunState) -> None:
        if state.status == "failed":
            self._console.print(Text(f"failed: {run.id}: {state.reason}", "red"))

    def tick(self, plan: Plan, states: Mapping[str, RunState]) -> None:
        self._live.update(self._drawn(plan, states))

    def _drawn(self, plan: Plan, states: Mapping[str, RunState]) -> RenderableType:
        runs = sorted(plan.runs, key=lambda run: ORDER.index(states[run.id].status))
        room = max(3, self._console.height - 6)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("run", "", "step", "score", "KL"):
            table.add_column(name, justify="right" if name in ("step", "score", "KL") else "left")
        for run in runs[:room]:
            table.add_row(*_row(run, states[run.id]))
        hidden = [Text(f"... and {len(runs) - room} more", "dim")] if len(runs) > room else []
        return Group(table, *hidden, Text(overview(plan, states, self._speed), "bold"))


class Lines:
    """A line when a run starts or ends, and an overview every minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._speed = Speed()
        self._last = time.monotonic()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def changed(self, run: PlannedRun, state: RunState) -> None:
        scores = "" if state.score is None else f", score {state.score:.3f}"
        words = {
            "running": f"from step {state.step}" if state.step else "",
            "done": f"{plural(state.step, 'step')}{scores}",
            "failed": f"at step {state.step}: {state.reason}",
        }
        self._print(f"{state.status} {run.id} {words.get(state.status, '')}".rstrip())

    def tick(self, plan: Plan, states: Mapping[str, RunState]) -> None:
        line = overview(plan, states, self._speed)
        if time.monotonic() - self._last > OVERVIEW_EVERY:
            self._last = time.monotonic()
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


class Speed:
    """Estimates the time left from the steps made since the first call."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def left(self, done: int, total: int) -> float | None:
        """Seconds until the last step; None before any step was made."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, done
        since, before = self._first
        return (now - since) / (done - before) * (total - done) if done > before else None


def overview(plan: Plan, states: Mapping[str, RunState], speed: Speed) -> str:
    """The line `7 of 15 runs done, 2 running, 1 failed; about 6 min left`; runs to come count."""
    counts = Counter(state.status for state in states.values())
    words = [f"{counts['done']} of {len(plan.runs) + plan.runs_to_come} runs done"]
    words += [f"{counts[name]} {name}" for name in ("running", "failed") if counts[name]]
    total = sum(run.steps for run in plan.runs if states[run.id].status != "failed")
    done = sum(state.step for state in states.values() if state.status != "failed")
    total += plan.runs_to_come * plan.runs[0].steps
    left = speed.left(done, total)
    return ", ".join(words) + (f"; about {_duration(left)} left" if left else "")


def _row(run: PlannedRun, state: RunState) -> list[RenderableType]:
    style = STYLE[state.status]
    bar = ProgressBar(total=run.steps, completed=state.step, width=20, complete_style=style)
    return [
        Text(run.id, style, overflow="ellipsis", no_wrap=True),
        bar if state.status == "running" else Text(state.status, style),
        f"{state.step}/{run.steps}",
        "" if state.score is None else f"{state.score:.3f}",
        "" if state.kl is None else f"{state.kl:.2f}",
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


__all__ = ["Lines", "LiveTable", "overview"]
