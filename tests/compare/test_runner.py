"""Real comparisons of real short runs: killed, stopped, failing, repeated."""

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparisons import SMALL, arguments, data_of, rows_of, run, start

from proxpo.compare.plan import read_plan
from proxpo.compare.runner import choose, opened
from proxpo.compare.state import state_of
from proxpo.errors import ProxpoError


def runs_of(folder: Path) -> list[Path]:
    return sorted((folder / "runs").iterdir())


def test_every_run_is_an_ordinary_run_with_its_command(uninterrupted):
    out, said = uninterrupted
    plan = read_plan(out)
    assert [path.name for path in runs_of(out)] == sorted(one.id for one in plan.runs)
    for planned in plan.runs:
        rows = rows_of(out / planned.folder)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert f"done {planned.id} 3 steps, score" in said
    assert "\x1b" not in said  # no control characters where there is no terminal
    assert (out / "report.html").stat().st_size > 0


def test_the_stored_command_repeats_the_run_bit_for_bit(uninterrupted, tmp_path):
    out, _ = uninterrupted
    folder = out / "runs" / "isopo-overlap-4-seed1"
    env, program, *words = shlex.split((folder / "command.txt").read_text())
    assert (env, program) == ("OMP_NUM_THREADS=1", "proxpo")
    words[words.index("--out") + 1] = str(tmp_path / "again")
    done = subprocess.run(
        [sys.executable, "-m", "proxpo.cli", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "again") == rows_of(folder)


def test_the_same_seed_gives_every_method_the_same_prompts(uninterrupted):
    out, _ = uninterrupted

    def prompts(name: str) -> list:
        lines = (out / "runs" / name / "samples.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    assert prompts("grpo-seed0") == prompts("isopo-overlap-4-seed0")
    assert prompts("grpo-seed0") != prompts("grpo-seed1")


def test_a_finished_comparison_is_not_repeated(uninterrupted):
    out, _ = uninterrupted
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    code, said, errors = run(["compare", "--out", str(out)])  # the plan is in the folder
    assert code == 0, errors
    assert "running" not in said
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_killed_at_any_moment_and_restarted_it_ends_the_same(uninterrupted, tmp_path):
    straight, _ = uninterrupted
    out = tmp_path / "killed"
    argv = arguments(out, "grpo", "isopo:overlap=4", seeds="2", jobs="2")
    moments = random.Random(1)
    for _ in range(4):
        process = start(argv)
        _wait_for(lambda: list(out.glob("runs/*/metrics.jsonl")))
        time.sleep(moments.uniform(0.0, 2.0))
        process.kill()
        process.communicate()
    assert read_plan(out) == read_plan(straight)
    code, _, errors = run(argv)
    assert code == 0, errors
    assert data_of(out) == data_of(straight)


def test_a_killed_comparison_leaves_nothing_running(tmp_path):
    out = tmp_path / "killed"
    process = start(arguments(out, "grpo", small=(*SMALL, "steps=500"), seeds="1"))
    _wait_for(lambda: list(out.glob("runs/*/metrics.jsonl")))
    assert _working_in(out)
    process.kill()
    process.communicate()
    _wait_for(lambda: not _working_in(out), seconds=10)


def test_interrupted_it_stops_its_runs_which_save(tmp_path):
    out = tmp_path / "stopped"
    small = (*SMALL, "steps=500", "checkpoint.every=0")
    process = start(arguments(out, "grpo", small=small, seeds="1"))
    _wait_for(lambda: _steps(out / "runs/grpo-seed0") >= 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert not _working_in(out)
    folder = out / "runs/grpo-seed0"
    saved = [int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*")]
    assert max(saved) == _steps(folder) >= 2  # no checkpoint was due: this one is from stopping
    assert state_of(folder, steps=500, score="x").status == "running"  # neither done nor failed


REWARDS = """
def score(prompts, completions, **_):
    raise RuntimeError("no judge today")
"""


def test_failing_runs_are_kept_with_their_reason_and_spoil_nothing(tmp_path):
    """One arm diverges, one is killed as for want of memory; the third is reported all the same."""
    out = tmp_path / "failing"
    methods = ("grpo", "grpo:lr=1e30,grad_clip=none", "grpo:steps=4000")
    process = start(arguments(out, *methods, seeds="1", jobs="3"))
    long = out / "runs/grpo-steps-4000-seed0"
    _wait_for(lambda: _steps(long) >= 1)
    for pid in _working_in(long):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "2 of 3 runs failed; --retry-failed tries again" in said
    killed = json.loads((long / "failure.json").read_text())
    assert killed["reason"] == "killed by SIGKILL (out of memory?)"
    assert killed["step"] >= 1
    diverged = json.loads(next(out.glob("runs/grpo-lr-1e-30*/failure.json")).read_text())
    assert "not finite" in diverged["reason"]
    assert json.loads((out / "runs/grpo-seed0/summary.json").read_text())["steps"] == 3
    page = (out / "report.html").read_text()
    assert "killed by SIGKILL" in page

    code, said, _ = run(["compare", "--out", str(out)])
    assert code == 0
    assert "running" not in said  # failed runs are left alone
    assert (long / "failure.json").exists()


def test_a_failed_run_is_tried_again_when_asked(tmp_path):
    """A reward file that raises fails every run; mended, the runs go on and are whole."""
    out, file = tmp_path / "failing", tmp_path / "reward.py"
    file.write_text(REWARDS)
    small = (*SMALL, f"task.reward={file}:score", "reward_max_failed=0")
    argv = arguments(out, "grpo", small=small, seeds="1")
    code, said, _ = run(argv)
    assert code == 1  # nothing at all was finished
    failure = json.loads((out / "runs/grpo-seed0/failure.json").read_text())
    assert "no judge today" in failure["reason"]
    assert "no judge today" in said
    file.write_text("def score(prompts, completions, **_):\n    return [1.0] * len(prompts)\n")
    code, said, errors = run([*argv, "--retry-failed"])
    assert code == 0, errors
    assert not (out / "runs/grpo-seed0/failure.json").exists()
    assert [row["step"] for row in rows_of(out / "runs/grpo-seed0")] == [0, 1, 2, 3]


def test_a_sweep_chooses_on_tuning_seeds_and_reports_on_others(tmp_path):
    out = tmp_path / "swept"
    options = {"seeds": "1", "tune_seeds": "1", "sweep": "lr=1e-5,1e30", "jobs": "2"}
    small = (*SMALL, "steps=6", "grad_clip=none")
    code, said, errors = run(arguments(out, "grpo", small=small, **options))
    assert code == 0, errors
    plan = read_plan(out)
    assert "chosen for grpo: lr=1e-05" in said
    (chosen,) = plan.chosen
    assert chosen.settings == {"lr": 1e-5}
    assert [value is None for _, value in chosen.scores] == [False, True]  # the other failed
    (reported,) = [one for one in plan.runs if one.role == "report"]
    assert (reported.seed, dict(reported.settings)) == (0, {"lr": 1e-5})
    assert rows_of(out / reported.folder)[-1]["step"] == 6
    assert choose(plan, out) == list(plan.chosen)  # from the files alone


def test_two_comparisons_do_not_share_a_folder(tmp_path, uninterrupted):
    plan = read_plan(uninterrupted[0])
    with (
        opened(tmp_path / "one", plan),
        pytest.raises(ProxpoError, match=f"another comparison is at work .*{os.getpid()}"),
        opened(tmp_path / "one", plan),
    ):
        pass
    with opened(tmp_path / "one", plan) as found:  # the lock goes with its holder
        assert found == plan


def _steps(folder: Path) -> int:
    return state_of(folder, steps=10**9, score="x").step


def _wait_for(condition, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def _working_in(folder: Path) -> list[int]:
    """Processes that hold a file of the folder open, the comparison itself left out."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held = [os.readlink(one) for one in (process / "fd").iterdir()]
            if any(path.startswith(f"{folder}/") and "/runs/" in f"{path}/" for path in held):
                found.append(int(process.name))
    return found
