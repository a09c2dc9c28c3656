"""Runs read from files: proxpo's, TRL's, verl's, and damaged ones."""

import json

import made
import pytest
from transformers.trainer_callback import TrainerState

from proxpo.compare.state import state_of
from proxpo.errors import ProxpoError
from proxpo.report.comparison_report import gather_runs
from proxpo.report.metrics import (
    KL,
    SCORE,
    phase_seconds,
    pick_variant,
    samples_drawn,
    seconds_spent,
    series,
)
from proxpo.report.read_runs import read_comparison, read_run
from proxpo.report.run_data import rows_by_step


def one_run(folder, *, steps=10, every=5, method="grpo", seed=1, bare=False, **kind):
    metrics = list(made.rows(0.3, seed, steps=steps, every=every, bare=bare))
    made.write_run(folder, made.config(method, seed, steps), metrics, **kind)
    return folder


def trl_history(steps, every):
    """A log of transformers: training rows, evaluation rows of the same step, an end."""
    history = []
    for step in range(every, steps + 1, every):
        history.append(
            {"step": step, "loss": 0.1, "reward": step / steps, "step_time": 2.0, "epoch": 0.1}
        )
        history.append({"step": step, "eval_reward": step / steps / 2, "eval_loss": 0.2})
    return [*history, {"step": steps, "train_runtime": 12.0, "total_flos": 0}]


def write_state(folder, steps=20, *, wanted=None, every=5):
    folder.mkdir(parents=True)
    history = trl_history(steps, every)
    state = TrainerState(log_history=history, global_step=steps, max_steps=wanted or steps)
    state.save_to_json(str(folder / "trainer_state.json"))
    return folder / "trainer_state.json"


def write_verl(path, steps=4):
    """Lines as verl's FileLogger writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "data": {"val-core/openai/gsm8k/reward/mean@1": 0.1}}]
    for step in range(1, steps + 1):
        data = {
            "critic/rewards/mean": step / 10,
            "actor/grad_norm": 0.5,
            "perf/time_per_step": 3.0,
            "timing_s/gen": 2.0,
            "timing_s/step": 3.0,
            "actor/entropy": None,
        }
        if step % 2 == 0:
            data["val-core/openai/gsm8k/reward/mean@1"] = step / 5
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_of_proxpo(tmp_path):
    run = read_run(one_run(tmp_path / "a"))
    assert (run.name, run.method, run.seed, run.status, run.source) == (
        "grpo", "grpo", 1, "done", "proxpo",
    )  # fmt: skip
    assert [row["step"] for row in run.rows] == list(range(11))
    assert "loss" not in run.rows[3]  # null: not measured
    assert run.config["rollout"]["prompts_per_step"] == 64
    assert read_run(tmp_path / "a" / "metrics.jsonl") == run


@pytest.mark.parametrize("cut", [1, 40])
def test_a_cut_last_line_is_said_and_the_rest_read(tmp_path, cut):
    folder = one_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: -cut - 1])
    run = read_run(folder)
    assert len(run.rows) == 10
    assert run.notes == (f"{folder}/metrics.jsonl: the last line is cut off; 10 lines before it "
                         "stand",)  # fmt: skip


def test_damage_in_the_middle_costs_one_line(tmp_path):
    folder = one_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[4] = lines[4][:20]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text("{")
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert any("line 5 is damaged" in note for note in run.notes)
    assert any("summary.json is damaged" in note for note in run.notes)
    assert run.status == "running"


HOSTILE_LINES = {
    "nested too deeply": "[" * 100_000,
    "a very long integer": '{"step": 3, "reward": ' + "9" * 5000 + "}",
    "an integer beyond floats": '{"step": 3, "reward": ' + "9" * 400 + "}",
    "1e308": '{"step": 3, "reward": 1e308}',
    "text for a number": '{"step": 3, "reward": "0.5"}',
    "null for a step": '{"step": null, "reward": 7.0}',
    "text for a step": '{"step": "3", "reward": 7.0}',
    "a negative step": '{"step": -3, "reward": 7.0}',
    "half a step": '{"step": 3.5, "reward": 7.0}',
    "an endless step": '{"step": 1e300, "reward": 7.0}',
    "a list": "[1, 2]",
    "NaN": '{"step": 3, "reward": NaN}',
}


@pytest.mark.parametrize("line", HOSTILE_LINES.values(), ids=HOSTILE_LINES)
def test_a_hostile_line_costs_itself_alone_and_is_said(tmp_path, line):
    folder = one_run(tmp_path / "a")
    path = folder / "metrics.jsonl"
    lines = [one for one in path.read_text().splitlines() if json.loads(one)["step"] != 3]
    path.write_text("\n".join([*lines[:5], line, *lines[5:]]) + "\n")
    run = read_run(folder)
    steps = series(run, "reward").steps.tolist()
    assert steps == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert run.notes or run.broken == {"reward": 3.0}
    assert 7.0 not in series(run, "reward").values
    assert state_of(folder, steps=10, score="reward").step == 10


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("config.yaml", "train: 3\n", "'train' is no dict"),
        ("config.yaml", "seed: 1.5\n", "'seed' is no int"),
        ("config.yaml", "seed: 0x" + "f" * 5000, "number of too many digits"),
        ("config.yaml", "a: &a [*a]\n", "nested too deeply"),
        ("config.yaml", "name: 2024-99-99\n", "month must be in 1..12"),
        ("config.yaml", "? [a]\n: b\n", "expected a name before the colon"),
        ("summary.json", '{"steps": "all"}', ""),
        ("summary.json", "[" * 100_000, "summary.json is damaged"),
        ("failure.json", '{"reason": [[]], "step": {}}', ""),
    ],
)
def test_a_hostile_file_of_a_run_is_read_as_far_as_it_means_something(
    tmp_path, name, content, note
):
    folder = one_run(tmp_path / "a")
    (folder / name).write_text(content)
    run = read_run(folder)
    assert len(run.rows) == 11
    assert any(note in one for one in run.notes) or not note
    assert not isinstance(run.seed, float)


def test_a_value_logged_as_nan_is_no_earlier_value():
    logged = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.9}, {"step": 2, "reward": "nan"}]
    read = rows_by_step(logged, shown="x")
    assert read.rows == ({"step": 1.0, "reward": 0.5}, {"step": 2.0})
    assert read.broken == {"reward": 2.0}


def test_a_folder_that_holds_another_run_than_planned_is_not_averaged(tmp_path):
    made.comparison(tmp_path, arms={"isopo": 0.3, "grpo": 0.2}, steps=10, every=5, bare=True)
    other = made.config("grpo", 1, 10)
    made.write_run(tmp_path / "runs/isopo-seed1", other, made.rows(0.2, 1, steps=10, every=5))
    run = read_comparison(tmp_path).runs[0]
    assert (run.status, run.reason) == ("failed", "its folder holds another run (method grpo)")


def test_of_several_validation_sets_the_one_all_runs_have_is_compared(tmp_path):
    for name, sets in (("a", ("aime", "gsm8k")), ("b", ("gsm8k",))):
        data = {f"val-core/{one}/acc/mean@1": 0.5 for one in sets}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    runs = [read_run(tmp_path / f"{name}.jsonl") for name in ("a", "b")]
    assert set(pick_variant(SCORE, runs).names.values()) == {"val-core/gsm8k/acc/mean@1"}


def test_two_names_that_differ_are_told_apart_by_their_paths(tmp_path):
    for name, task, model in (("a", "arithmetic", "tiny"), ("b", "gsm8k", "smollm2")):
        config = made.config("grpo", 1, 4) | {"task": {"name": task}, "model": {"name": model}}
        made.write_run(tmp_path / name, config, made.rows(0.3, 1, steps=4, every=2))
    runs = gather_runs([str(tmp_path / name) for name in "ab"], tmp_path).runs
    assert runs[1].name == "grpo model.name=smollm2 task.name=gsm8k"


def test_statuses(tmp_path):
    failure = {"reason": "out of memory", "step": 4, "phase": "update", "type": "X"}
    failed = read_run(one_run(tmp_path / "f", failure=failure))
    assert (failed.status, failed.reason) == ("failed", "out of memory (step 4)")
    assert read_run(one_run(tmp_path / "r", done=False)).status == "running"
    early = one_run(tmp_path / "e")
    (early / "summary.json").write_text('{"steps": 7}')
    assert read_run(early).reason == "stopped after step 7 of 10"
    (early / "failure.json").write_text('{"reason": "killed", "step": 7}')
    assert read_run(early).status == "failed"
    (early / "summary.json").write_text('{"steps": 10}')  # went on and finished
    assert read_run(early).status == "done"


def test_trl_by_file_checkpoint_and_output_folder(tmp_path):
    out = tmp_path / "trl-grpo-seed7"
    write_state(out / "checkpoint-5", 5, wanted=20)
    newest = write_state(out / "checkpoint-10", 10, wanted=20)
    write_state(out / "checkpoint-9", 9, wanted=20)
    by_folder, by_file, by_checkpoint = (read_run(x) for x in (out, newest, newest.parent))
    assert by_folder.rows == by_file.rows == by_checkpoint.rows
    for run in (by_folder, by_file, by_checkpoint):
        assert (run.name, run.seed, run.source) == ("trl-grpo", 7, "trl")
        assert "ends at step 10 of 20" in run.notes[0]
    assert [row["step"] for row in by_folder.rows] == [5, 10]
    assert by_folder.rows[0]["eval_reward"] == 0.25  # evaluation joins the step it belongs to
    assert by_folder.rows[0]["reward"] == 0.5
    write_state(tmp_path / "whole")
    (out / "trainer_state.json").write_bytes((tmp_path / "whole/trainer_state.json").read_bytes())
    assert len(read_run(out).rows) == 4  # the folder's own state comes first


def test_a_row_every_five_steps_costs_five_steps(tmp_path):
    run = read_run(write_state(tmp_path / "x", 20, every=5))
    assert seconds_spent(run).values.tolist() == [0, 10, 20, 30, 40]
    assert seconds_spent(run).steps.tolist() == [0, 5, 10, 15, 20]


def test_verl_file_log(tmp_path):
    path = write_verl(tmp_path / "project" / "grpo_seed3.jsonl")
    for run in (read_run(path), read_run(path.parent)):
        assert (run.name, run.seed, run.source) == ("grpo", 3, "verl")
        assert len(run.rows) == 5
        assert phase_seconds(run) == {"gen": 2.0}
        assert seconds_spent(run).values.tolist() == [0, 3, 6, 9, 12]
    with path.open("ab") as file:
        file.write(b'{"step": 5, "da')
    assert "last line is cut off" in read_run(path).notes[0]
    write_verl(path.with_name("other.jsonl"))
    with pytest.raises(ProxpoError, match=r"2 \.jsonl files, name one"):
        read_run(path.parent)


def test_verl_writes_what_is_read_here(tmp_path):
    """The format itself, made by hand from verl's FileLogger: bytes of orjson, one line a step."""
    line = b'{"step":1,"data":{"critic/score/mean":0.5,"x":null,"text":"y"}}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    assert read_run(tmp_path / "a.jsonl").rows == ({"critic/score/mean": 0.5, "step": 1},)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "no such run"),
        (lambda p: p, "no run; expected a proxpo run folder"),
        (lambda p: _text(p / "a.txt", "x"), "is not a run"),
        (lambda p: _text(p / "a.json", "{}"), "no log_history"),
        (lambda p: _text(p / "a.json", "[1"), "no log_history"),
        (lambda p: _text(p / "a.jsonl", '{"step": 1}\n'), "no metrics of a verl run"),
        (
            lambda p: (_text(p / "config.yaml", ""), _text(p / "problems.jsonl", "").parent)[1],
            "is a run of proxpo adapt: its report is .*report.html",
        ),
    ],
)
def test_what_is_no_run(tmp_path, make, message):
    with pytest.raises(ProxpoError, match=message):
        read_run(make(tmp_path))


def _text(path, text):
    path.write_text(text)
    return path


def test_a_comparison_with_a_failed_and_a_waiting_run(tmp_path):
    arms = {"isopo": 0.3, "grpo": 0.2}
    made.comparison(
        tmp_path, arms=arms, steps=10, every=5, failed=[("grpo", 1)], waiting=[("grpo", 2)]
    )
    found = read_comparison(tmp_path)
    assert [(r.name, r.seed, r.status) for r in found.runs if r.status != "done"] == [
        ("grpo", 1, "failed"), ("grpo", 2, "waiting"),
    ]  # fmt: skip
    assert found.runs[0].command.startswith("proxpo train base.yaml --method isopo")
    assert found.score == "proxpo/eval/accuracy"
    with pytest.raises(ProxpoError, match="holds no comparison"):
        read_comparison(tmp_path / "runs")


def test_variants_are_not_mixed(tmp_path):
    own = read_run(one_run(tmp_path / "own"))
    trl = read_run(write_state(tmp_path / "trl"))
    verl = read_run(write_verl(tmp_path / "v.jsonl"))
    assert pick_variant(SCORE, [own, own]).variant.label == "greedy accuracy, held out"
    assert pick_variant(SCORE, [own, trl]).variant.label == "training reward"  # the one both have
    assert pick_variant(SCORE, [trl, verl]).names == {
        0: "eval_reward", 1: "val-core/openai/gsm8k/reward/mean@1",
    }  # fmt: skip
    assert pick_variant(KL, [own, trl]).names == {0: "proxpo/eval/kl"}
    assert pick_variant(KL, [trl]) is None
    sampled = pick_variant(SCORE, [own], wanted="proxpo/eval/avg@4")
    assert sampled.names == {0: "proxpo/eval/avg@4"}
    assert sampled.variant.label == "accuracy of sampled answers, held out"
    assert sampled.variant.share
    assert pick_variant(SCORE, [own], wanted="grad_norm").variant.label != "grad_norm"


def test_samples_are_summed_from_step_zero(tmp_path):
    run = read_run(one_run(tmp_path / "own"))
    assert samples_drawn(run).values.tolist() == [512.0 * n for n in range(11)]
    assert series(run, "reward").steps.tolist() == list(range(1, 11))


def test_loose_runs_are_named_by_what_differs(tmp_path):
    for seed in (1, 2):
        one_run(tmp_path / f"a{seed}", seed=seed)
        settings = made.config("grpo", seed, 10) | {"train": {"steps": 10, "lr": 1e-3}}
        made.write_run(tmp_path / f"b{seed}", settings, made.rows(0.2, seed, steps=10, every=5))
    one_run(tmp_path / "c", method="p3o")
    paths = [str(tmp_path / name) for name in ("a1", "a2", "b1", "b2", "c")]
    found = gather_runs([*paths, f"mine={tmp_path / 'a1'}"], tmp_path / "out")
    assert [run.name for run in found.runs] == [
        "grpo lr=0.0002", "grpo lr=0.0002", "grpo lr=0.001", "grpo lr=0.001", "p3o", "mine",
    ]  # fmt: skip
    with pytest.raises(ProxpoError, match="both 'grpo' with seed 1: tell them apart"):
        gather_runs([paths[0], paths[0]], tmp_path)
