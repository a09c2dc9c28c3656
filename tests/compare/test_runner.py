"""Real comparisons of real short runs: killed, stopped, failing, repeated."""

import contextlib
import html
import json
import os
import random
import re
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from comparisons import SMALL, Started, arguments, data_of, folder_of, rows_of

from proxpo.cli import main
from proxpo.compare.local import LocalPool
from proxpo.compare.plan import read_plan
from proxpo.compare.runner import open_comparison
from proxpo.compare.state import state_of
from proxpo.compare.tuning import choose_settings
from proxpo.errors import ProxpoError


def test_every_run_is_an_ordinary_run_with_its_command(uninterrupted):
    out, said = uninterrupted
    plan = read_plan(out)
    assert sorted(path.name for path in out.glob("runs/*")) == sorted(r.id for r in plan.runs)
    for planned in plan.runs:
        rows = rows_of(out / planned.folder)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert f"done {planned.id} 3 steps, score" in said
    assert "\x1b" not in said  # no control characters where there is no terminal
    assert (out / "report.html").stat().st_size > 0


def test_the_command_on_the_page_repeats_the_run_anywhere(uninterrupted, tmp_path, monkeypatch):
    """Bit for bit, from another folder, into a folder of its own."""
    out, _ = uninterrupted
    folder = folder_of(out, "isopo overlap=4", 1)
    page = (out / "report.html").read_text()
    commands = map(html.unescape, re.findall(r'class="command"><pre>(.*?)</pre>', page))
    [text] = [line for line in commands if "--seed=1 " in line and "overlap=4" in line]
    env, program, *words = shlex.split(text)
    assert (env, program) == ("OMP_NUM_THREADS=1", "proxpo")
    assert "--resume" not in words
    assert str(out) not in text
    monkeypatch.chdir(tmp_path)
    code, _, errors = Started(words, tmp_path).wait()
    assert code == 0, errors
    assert rows_of(tmp_path / words[words.index("--out") + 1]) == rows_of(folder)


def test_the_same_seed_gives_every_method_the_same_prompts(uninterrupted):
    out, _ = uninterrupted

    def prompts(arm: str, seed: int) -> list:
        lines = (folder_of(out, arm, seed) / "samples.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    assert prompts("grpo", 0) == prompts("isopo overlap=4", 0)
    assert prompts("grpo", 0) != prompts("grpo", 1)


def test_a_finished_comparison_is_not_repeated(uninterrupted, capsys):
    out, _ = uninterrupted
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/metrics.jsonl")}
    assert main(["compare", "--out", str(out)]) == 0  # the plan is in the folder
    out = capsys.readouterr().out
    assert "running" not in out
    assert f"all {len(before)} runs done before" in out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_killed_at_any_moment_and_restarted_it_ends_the_same(uninterrupted, tmp_path):
    straight, _ = uninterrupted
    out = tmp_path / "killed"
    argv = arguments(out, "grpo", "isopo:overlap=4", seeds="2", jobs="2")
    moments = random.Random(1)
    for _ in range(2):
        logs = len(list(out.glob("runs/*/log.txt")))
        process = Started(argv, tmp_path)
        _wait_for(lambda before=logs: before or list(out.glob("runs/*/log.txt")))
        _wait_for(lambda: _working_in(out))
        time.sleep(moments.uniform(0.0, 3.0))
        process.send(signal.SIGKILL)
        assert process.wait()[0] == -signal.SIGKILL
        _wait_for(lambda: not _working_in(out))  # its runs are gone with it
    assert read_plan(out) == read_plan(straight)
    code, _, errors = Started(argv, tmp_path).wait()
    assert code == 0, errors
    assert data_of(out) == data_of(straight)


def test_interrupted_it_stops_its_runs_which_save(tmp_path, capsys):
    out = tmp_path / "stopped"
    folder = out / "runs/grpo-seed0"
    small = (*SMALL, "steps=500", "checkpoint.every=0", "evaluate.every=500")

    def interrupt() -> None:
        _wait_for(lambda: _steps(folder) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    threading.Thread(target=interrupt, daemon=True).start()
    assert main(arguments(out, "grpo", small=small, seeds="1")) == 130
    signal.signal(signal.SIGINT, before)
    assert "the same command goes on" in capsys.readouterr().out
    assert not _working_in(out)
    saved = [int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*")]
    assert max(saved) == _steps(folder) >= 2  # no checkpoint was due: this one is from stopping
    assert state_of(folder, steps=500, score="x").status == "running"  # neither done nor failed


def test_failing_runs_are_kept_with_their_reason_and_spoil_nothing(tmp_path, capsys):
    """One arm diverges, one is killed as by the out-of-memory killer; the third is reported."""
    out = tmp_path / "failing"

    def kill() -> None:
        _wait_for((out / "plan.yaml").exists)
        long = folder_of(out, "grpo steps=4000", 0)
        _wait_for(lambda: _steps(long) >= 1)
        _wait_for(lambda: _working_in(long))
        for pid in _working_in(long):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    methods = ("grpo", "grpo:lr=1e30,grad_clip=none", "grpo:steps=4000")
    assert main(arguments(out, *methods, seeds="1", jobs="3")) == 0
    assert "2 of 3 runs failed; --retry-failed tries again" in capsys.readouterr().out
    long = folder_of(out, "grpo steps=4000", 0)
    killed = json.loads((long / "failure.json").read_text())
    assert killed["reason"] == "killed by SIGKILL (out of memory?)"
    assert killed["step"] >= 1
    folder = folder_of(out, "grpo lr=1e+30 grad_clip=none", 0)
    diverged = json.loads((folder / "failure.json").read_text())
    assert "not finite" in diverged["reason"]
    assert json.loads((out / "runs/grpo-seed0/summary.json").read_text())["steps"] == 3
    assert "killed by SIGKILL" in (out / "report.html").read_text()

    assert main(["compare", "--out", str(out)]) == 0
    assert "running" not in capsys.readouterr().out  # failed runs are left alone
    assert (long / "failure.json").exists()


REWARDS = """
def score(prompts, completions, **_):
    raise RuntimeError("no judge today")
"""


def test_a_failed_run_is_tried_again_when_asked(tmp_path, capsys):
    """A reward file that raises fails every run; corrected, the runs continue and finish."""
    out, file = tmp_path / "failing", tmp_path / "reward.py"
    file.write_text(REWARDS)
    small = (*SMALL, f"task.reward={file}:score", "reward_max_failed=0")
    argv = arguments(out, "grpo", small=small, seeds="1")
    assert main(argv) == 1  # nothing at all was finished
    failure = json.loads((out / "runs/grpo-seed0/failure.json").read_text())
    assert "no judge today" in failure["reason"]
    assert "no judge today" in capsys.readouterr().out
    file.write_text("def score(prompts, completions, **_):\n    return [1.0] * len(prompts)\n")
    assert main([*argv, "--retry-failed"]) == 0
    assert not (out / "runs/grpo-seed0/failure.json").exists()
    assert [row["step"] for row in rows_of(out / "runs/grpo-seed0")] == [0, 1, 2, 3]


def test_a_sweep_chooses_on_tuning_seeds_and_reports_on_others(tmp_path, capsys):
    out = tmp_path / "swept"
    options = {"seeds": "1", "tune_best": "2", "sweep": "lr=1e-5,2,1e30", "jobs": "2"}
    small = (*SMALL, "steps=6", "evaluate.every=6", "grad_clip=none")
    assert main(arguments(out, "grpo", small=small, **options)) == 0
    plan = read_plan(out)
    assert "chosen for grpo: lr=1e-05" in capsys.readouterr().out
    (chosen,) = plan.chosen
    assert chosen.settings == {"lr": 1e-5}
    assert [value is None for _, value in chosen.scores] == [False, False, True]  # one failed
    second = [one.settings["lr"] for one in plan.runs if one.seed == plan.seeds.tune[1]]
    assert second == [1e-5, 2]  # which went on
    (reported,) = [one for one in plan.runs if one.role == "report"]
    assert (reported.seed, dict(reported.settings)) == (0, {"lr": 1e-5})
    assert rows_of(out / reported.folder)[-1]["step"] == 6
    assert choose_settings(plan, out) == list(plan.chosen)  # from the files alone
    with pytest.raises(ProxpoError, match="no run of grpo has logged proxpo/eval/other"):
        choose_settings(replace(plan, score="proxpo/eval/other"), out)


def test_two_comparisons_do_not_share_a_folder(tmp_path, uninterrupted):
    plan = read_plan(uninterrupted[0])
    with (
        open_comparison(tmp_path / "one", plan),
        pytest.raises(ProxpoError, match=f"another comparison is at work .*{os.getpid()}"),
        open_comparison(tmp_path / "one", plan),
    ):
        pass
    with open_comparison(tmp_path / "one", plan) as found:  # the lock goes with its holder
        assert found == plan


def _steps(folder: Path) -> int:
    return state_of(folder, steps=10**9, score="x").step


def _wait_for(condition, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def _working_in(folder: Path) -> list[int]:
    """Processes that hold a run's file in this folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            held = [_target(one) for one in (process / "fd").iterdir()]
            if any(path.startswith(f"{folder}/") and "/runs/" in path for path in held):
                found.append(int(process.name))
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since it was listed
        return ""


def test_runs_that_share_a_gpu_get_equal_parts_of_its_memory(monkeypatch):
    monkeypatch.setattr("proxpo.compare.local._gpus", lambda: 2)
    shares = [LocalPool("x:y", jobs=jobs).gpu_share for jobs in (1, 2, 3, 8)]
    assert shares == [0.0, 0.0, 0.47, 0.235]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-8f, GPU-1c", ["GPU-8f", "GPU-1c"])],
)
def test_runs_keep_to_the_gpus_that_the_comparison_was_given(
    given, expected, tmp_path, monkeypatch
):
    """Real runs, of a program that writes down which GPU it sees."""
    (tmp_path / "seen_gpu.py").write_text(
        "import os, pathlib\n"
        "def main(argv):\n"
        "    pathlib.Path(argv[0], 'gpu').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("proxpo.compare.local._gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    pool = LocalPool("seen_gpu:main", jobs=len(expected))
    folders = [tmp_path / str(number) for number in range(len(expected))]
    for folder in folders:
        pool.start(folder.name, [str(folder)], folder)
    ended = 0
    while ended < len(folders):
        ended += len(pool.finished(60.0))
    assert [(folder / "gpu").read_text() for folder in folders] == expected
