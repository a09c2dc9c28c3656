"""The display of a comparison that runs, on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from proxpo.compare.design import make_plan
from proxpo.compare.live import Lines, LiveTable, Speed, overview
from proxpo.compare.request import Request, parse_arm
from proxpo.compare.state import RunState


@pytest.fixture
def plan():
    arms = [parse_arm("grpo"), parse_arm("p3o")]
    return make_plan(Request(arms=arms, seeds=2, base=[("steps", 10)]))


@pytest.fixture
def states():
    return {
        "grpo-seed0": RunState(status="done", step=10, score=0.75, kl=1.25),
        "p3o-seed0": RunState(status="failed", step=3, reason="the [gradient] was not finite"),
        "grpo-seed1": RunState(status="running", step=4, score=0.5),
        "p3o-seed1": RunState(status="waiting"),
    }


def test_the_table_shows_every_run_the_running_ones_first(plan, states):
    console = Console(file=io.StringIO(), force_terminal=True, width=90, height=30)
    with LiveTable(console) as table:
        table.changed(plan.runs[1], states["p3o-seed0"])
        table.tick(plan, states)
    text = console.file.getvalue()
    assert "failed: p3o-seed0: the [gradient] was not finite" in text
    drawn = Console(file=io.StringIO(), width=90)
    drawn.print(table._drawn(plan, states))
    lines = [line.rstrip() for line in drawn.file.getvalue().splitlines()]
    assert [line.split()[0] for line in lines[1:5]] == [
        "grpo-seed1",
        "p3o-seed0",
        "grpo-seed0",
        "p3o-seed1",
    ]
    assert lines[3].split() == ["grpo-seed0", "done", "10/10", "0.750", "1.25"]
    assert lines[-1] == "1 of 4 runs done, 1 running, 1 failed"


def test_a_table_that_does_not_fit_says_so(plan, states):
    console = Console(file=io.StringIO(), force_terminal=True, width=90, height=9)
    drawn = Console(file=io.StringIO(), width=90)
    drawn.print(LiveTable(console)._drawn(plan, states))
    text = drawn.file.getvalue()
    assert "... and 1 more" in text
    assert "p3o-seed1" not in text


def test_a_log_gets_a_line_when_something_happens(plan, states):
    console = Console(file=io.StringIO(), width=40)
    with Lines(console) as lines:
        for run in plan.runs:
            lines.changed(run, states[run.id])
        lines.tick(plan, states)
    assert console.file.getvalue().splitlines() == [
        "done grpo-seed0 10 steps, score 0.750",
        "failed p3o-seed0 at step 3: the [gradient] was not finite",
        "running grpo-seed1 from step 4",
        "waiting p3o-seed1",
    ]


def test_the_time_left_follows_the_pace(plan, states, monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("proxpo.compare.live.time.monotonic", lambda: next(clock))
    speed = Speed()
    assert "left" not in overview(plan, states, speed)  # nothing is known of the pace yet
    later = {**states, "grpo-seed1": RunState(status="running", step=9)}
    # 5 steps in 10 s; 30 steps in all without the failed run, 19 done, 11 to go
    assert overview(plan, later, speed).endswith("; about 22 s left")


def test_runs_that_follow_from_choices_count():
    request = Request(arms=[parse_arm("grpo")], seeds=3, sweep={"lr": (1e-4, 1e-3)})
    plan = make_plan(request)
    states = {run.id: RunState(status="waiting") for run in plan.runs}
    assert len(plan.runs) == 4
    assert overview(plan, states, Speed()) == "0 of 7 runs done"
