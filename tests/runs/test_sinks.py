"""Metrics: one honest line a step, TRL's names where it has one, a clean cut on resuming."""

import json
import math
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proxpo.errors import ProxpoError
from proxpo.runs.jsonlines import JsonLines
from proxpo.runs.sinks import check_sinks, make_sinks, public_names


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_flushed_line_a_step(tmp_path):
    sinks = make_sinks(tmp_path)
    for step in (1, 2):
        sinks.write(step, {"loss": torch.tensor(0.5), "num_tokens": 7, "kl": 0.25})
        assert len(rows(tmp_path)) == step, "not on disk while the run goes on"
    sinks.close()
    assert rows(tmp_path)[1] == {"step": 2, "loss": 0.5, "num_tokens": 7, "kl": 0.25}
    assert isinstance(rows(tmp_path)[1]["num_tokens"], int)


def test_no_line_is_invalid_json(tmp_path):
    with make_sinks(tmp_path) as sinks:
        sinks.write(1, {"loss": math.nan, "kl": torch.tensor(math.inf)})

    def refuse(name):
        raise AssertionError(name)

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "kl": None}


def test_no_line_of_samples_is_invalid_json(tmp_path):
    """A reward that could not be had is NaN."""
    row = {"step": 1, "reward": math.nan, "extra": {"x": [1.0, -math.inf]}, "at": tmp_path}
    with JsonLines(tmp_path / "samples.jsonl") as lines:
        lines.append(row)
    text = (tmp_path / "samples.jsonl").read_text()
    plain = {"step": 1, "reward": None, "extra": {"x": [1.0, None]}, "at": str(tmp_path)}
    assert json.loads(text, parse_constant=pytest.fail) == plain


def test_what_is_no_number_is_refused(tmp_path):
    with make_sinks(tmp_path) as sinks, pytest.raises(TypeError, match="a metric is a number"):
        sinks.write(1, {"loss": "high"})


def test_resuming_cuts_what_will_come_again(tmp_path):
    with make_sinks(tmp_path) as sinks:
        for step in range(1, 8):
            sinks.write(step, {"loss": step})
    with make_sinks(tmp_path, resume_at=4) as sinks:
        sinks.write(5, {"loss": 50})
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (5, 50)
    ]  # fmt: skip


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', "garbage\n", "\0\0"])
def test_a_half_written_line_is_cut(tmp_path, rest):
    with make_sinks(tmp_path) as sinks:
        sinks.write(1, {"loss": 1})
        sinks.write(2, {"loss": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    with make_sinks(tmp_path, resume_at=9) as sinks:
        sinks.write(3, {"loss": 3})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 0}\n{"step": 1, "loss": 1}')
    notes: list[str] = []
    with make_sinks(tmp_path, resume_at=1, on_notice=notes.append) as sinks:
        sinks.write(2, {"loss": 2})
    assert [row["loss"] for row in rows(tmp_path)] == [0, 1, 2]
    assert notes == []


def test_lost_rows_are_named_and_the_others_kept(tmp_path):
    kept = (0, 1, 4, 6, 7)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in kept))
    notes: list[str] = []
    with make_sinks(tmp_path, resume_at=9, on_notice=notes.append):
        pass
    assert [row["step"] for row in rows(tmp_path)] == list(kept)
    [note] = notes
    assert "metrics.jsonl has no row of step 2-3, 5, 8-9: these numbers are lost" in note


def test_a_step_that_stands_twice_is_written_once(tmp_path):
    lines = ['{"step": 0}', '{"step": 2}', '{"step": 1, "loss": 1}', '{"step": 1, "loss": 2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    notes: list[str] = []
    with make_sinks(tmp_path, resume_at=2, on_notice=notes.append):
        pass
    assert rows(tmp_path) == [{"step": 0}, {"step": 1, "loss": 2}, {"step": 2}]
    assert [note.split(": ")[1] for note in notes] == [
        "steps stood twice or out of order; the last row of each step is kept"
    ]


NO_ROWS = ("[" * 100_000, '{"step": true}', '{"step": -1}', '{"step": 1.5}', "9" * 5000, "{}")


@pytest.mark.parametrize("line", NO_ROWS, ids=lambda line: line[:16])
def test_what_is_no_row_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
    notes: list[str] = []
    with make_sinks(tmp_path, resume_at=1, on_notice=notes.append):
        pass
    assert rows(tmp_path) == [{"step": 0}, {"step": 1}]
    assert [note.split(": ")[1] for note in notes] == ["1 damaged line left out"]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        with make_sinks(tmp_path) as sinks:
            sinks.write(1, {"loss": 1})
    assert len(rows(tmp_path)) == 1
    with make_sinks(tmp_path, resume_at=0):
        pass
    assert rows(tmp_path) == []


def test_an_unwritable_place(tmp_path):
    with pytest.raises(ProxpoError, match="cannot be written: No such file"):
        JsonLines(tmp_path / "no" / "metrics.jsonl")


def test_a_write_the_kernel_refuses_is_a_clear_error(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sinks = make_sinks(tmp_path)
    sinks.write(1, {"loss": 1})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
        with pytest.raises(ProxpoError, match=r"metrics.jsonl cannot be written: File too large"):
            sinks.write(2, {"loss": 2})
        sinks.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with make_sinks(tmp_path, resume_at=1) as again:
        again.write(2, {"loss": 3})
    assert [row["loss"] for row in rows(tmp_path)] == [1, 3]


def test_names():
    same = ("loss", "reward", "reward_std", "grad_norm", "learning_rate", "num_tokens", "entropy")
    same += ("completions/mean_length", "completions/clipped_ratio", "kl", "frac_reward_zero_std")
    same += ("rewards/exact/mean", "clip_ratio/low_mean", "proxpo/eval/greedy", "step_time")
    changed = {
        "trust/clipped": "clip_ratio/region_mean",
        "kl/ref": "kl",
        "kl/old": "proxpo/kl/old",
        "ratio/ess": "proxpo/ratio/ess",
        "reward/timeout": "proxpo/reward/timeout",
        "losses": "proxpo/losses",
    }
    given = dict.fromkeys((*same, *changed), 1)
    del given["kl"]
    assert list(public_names(given)) == [n for n in same if n != "kl"] + list(changed.values())


def test_two_metrics_never_share_a_name():
    with pytest.raises(ValueError, match="'kl/ref' and 'kl' are both logged as 'kl'"):
        public_names({"kl/ref": 1, "kl": 2})


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with make_sinks(tmp_path, ["tensorboard"]) as sinks:
        for step in (1, 2, 3):
            sinks.write(step, {"loss": float(step), "kl": math.nan})
    with make_sinks(tmp_path, ["TensorBoard"], resume_at=1) as sinks:
        sinks.write(2, {"loss": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("package", ["trackio", "wandb"])
def test_trackers_are_called_as_they_expect(tmp_path, monkeypatch, package):
    calls = []
    stand_in = SimpleNamespace(
        init=lambda *, project, name, config: calls.append(("init", project, name, config)),
        log=lambda metrics, *, step: calls.append(("log", metrics, step)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, package, stand_in)
    with make_sinks(tmp_path, [package], project="p", config={"seed": 1}) as sinks:
        sinks.write(3, {"loss": torch.tensor(2.0), "ratio/ess": 1, "kl": math.nan})
    assert calls == [
        ("init", "p", tmp_path.name, {"seed": 1}),
        ("log", {"loss": 2.0, "proxpo/ratio/ess": 1}, 3),
        ("finish",),
    ]


def test_missing_and_unknown_sinks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ProxpoError, match="'trackio' is not installed: pip install trackio"):
        make_sinks(tmp_path, ["trackio"])
    with pytest.raises(ProxpoError, match="'trackio' is not installed"):
        check_sinks(["tensorboard", "trackio"])  # before a model is loaded
    with pytest.raises(ProxpoError, match="unknown sink 'wandbb'; did you mean 'wandb'"):
        make_sinks(tmp_path, ["wandbb"])
