"""`proxpo report`: redraws a comparison, compares runs made elsewhere, refuses in one line."""

import itertools
import json

import made
import pytest
from test_runs import one_run, write_state, write_verl

from proxpo.cli import main
from proxpo.report.comparison_report import write_comparison


@pytest.fixture
def refused(capsys):
    def run(*arguments):
        assert main([str(one) for one in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("proxpo: ")
        assert err.count("\n") == 1
        return err

    return run


def test_a_comparison_is_drawn_again_the_same(tmp_path, capsys):
    folder = made.comparison(tmp_path, arms={"a": 0.3, "b": 0.2}, steps=10, bare=True)
    write_comparison(folder)
    first = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "report.html").read_bytes() == first
    assert out.index(" 1. a") < out.index(" 2. b")
    assert "a beats b in final score by" in out
    assert f"report: {folder}/report.html" in out


def test_trl_verl_and_proxpo_side_by_side(tmp_path, capsys):
    for seed in (1, 2):
        one_run(tmp_path / f"own{seed}", seed=seed, steps=4, every=2, bare=True)
        write_state(tmp_path / f"trl-seed{seed}", 4, every=1)
        write_verl(tmp_path / f"verl_seed{seed}.jsonl", 4)
    paths = [tmp_path / name for name in ("own1", "own2", "trl-seed1", "trl-seed2")]
    paths += [tmp_path / f"verl_seed{seed}.jsonl" for seed in (1, 2)]
    out = tmp_path / "out"
    assert main(["report", *map(str, paths), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("training reward, step 4")
    summary = json.loads((out / "summary.json").read_text())
    finals = {one["arm"]: [seed["final"] for seed in one["seeds"]] for one in summary["arms"]}
    assert finals["trl"] == [1.0, 1.0]
    assert finals["verl"] == [0.4, 0.4]
    assert len(finals["grpo"]) == 2
    assert any("logged under different names" in note for note in summary["caveats"])


def test_trl_logs_with_different_logging_steps_are_reported(tmp_path, capsys):
    """One run logs steps 1 to 5, the other 10, 20 and 30: nothing to rank, and no traceback."""
    write_state(tmp_path / "a-seed1", 5, every=1)
    write_state(tmp_path / "b-seed1", 30, every=10)
    paths = [str(tmp_path / name) for name in ("a-seed1", "b-seed1")]
    assert main(["report", *paths, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Not comparable: settings differ")  # max_steps is in TRL's state
    assert "max_steps: 5 (a), 30 (b)" in out
    assert "No step lies within all runs" in out
    assert "beats" not in out


def test_runs_of_other_tasks_and_rates_are_not_ranked_without_a_word(tmp_path, capsys):
    for seed, (method, gain) in itertools.product((1, 2, 3), (("grpo", 0.3), ("p3o", 0.1))):
        settings = made.config(method, seed, 4)
        if method == "p3o":
            settings |= {"task": {"name": "gsm8k"}, "train": {"steps": 4, "lr": 1e-3}}
        metrics = made.rows(gain, seed, steps=4, every=2, bare=True)
        made.write_run(tmp_path / f"{method}{seed}", settings, metrics)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(["report", *paths, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Not comparable: settings differ beyond the arms")
    assert out.index("task.name: arithmetic (grpo), gsm8k (p3o)") < out.index(" 1. grpo")
    assert "train.lr: 0.0002 (grpo), 0.001 (p3o)" in out
    assert "beats" not in out
    assert "Nothing is claimed between grpo and p3o: their settings differ in" in out


def test_damage_and_failures_are_said_and_the_rest_reported(tmp_path, capsys):
    arms = {"a": 0.3, "b": 0.2}
    folder = made.comparison(
        tmp_path, arms=arms, steps=10, every=5, failed=[("b", 3)], waiting=[("a", 3)], bare=True
    )
    path = folder / "runs/a-seed1/metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "runs/a-seed1/metrics.jsonl: the last line is cut off; 10 lines before it stand" in out
    assert "2 seeds, 1 unfinished" in out
    assert "2 seeds, 1 failed" in out
    summary = json.loads((folder / "summary.json").read_text())
    states = {(run["arm"], run["seed"]): run["status"] for run in summary["runs"]}
    assert states == {
        ("a", 1): "done", ("a", 2): "done", ("a", 3): "waiting",
        ("b", 1): "done", ("b", 2): "done", ("b", 3): "failed",
    }  # fmt: skip


def test_a_plan_without_results_is_still_a_page(tmp_path, capsys):
    waiting = [("a", 1), ("a", 2), ("a", 3)]
    folder = made.comparison(tmp_path, arms={"a": 0.3}, steps=10, waiting=waiting)
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "No run holds a score: nothing can be ranked." in out
    assert "0 seeds, 3 unfinished" in out
    assert (folder / "report.html").exists()


def test_what_is_refused(tmp_path, refused):
    assert "no such run" in refused("report", tmp_path / "nothing")
    assert "RUN" in refused("report")
    (tmp_path / "plan.yaml").write_text("version: 1\narms: 3\n")
    assert "plan.yaml is damaged" in refused("report", tmp_path)
    one_run(tmp_path / "x", steps=4, every=2)
    assert "tell them apart" in refused("report", tmp_path / "x", tmp_path / "x")
    before = {path: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    assert "x holds a run, and" in refused("report", tmp_path / "x", "--out", tmp_path / "x")
    assert {path: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    other = made.comparison(tmp_path / "y", arms={"a": 0.3}, steps=2, waiting=[("a", 1)])
    line = refused("report", tmp_path / "x", "--out", other)
    assert f"{other} holds another comparison, and a report there would replace its" in line
    assert not (tmp_path / "report").exists()
