"""What a run says: bad input costs one line and leaves nothing; logs, scores and presets."""

import json
import os
import shutil
from pathlib import Path

import pytest
from fault_runs import command, rows_of

from proxpo.cli import main
from proxpo.compare.state import state_of
from proxpo.models import TINY
from proxpo.report.metrics import SCORE, pick_variant
from proxpo.report.read_runs import read_run
from proxpo.train.config import load_config, presets
from proxpo.train.loop import train
from proxpo.train.picture import draw_run, panels

pytestmark = pytest.mark.long


# Bad input -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder of things that are wrong."""
    place = tmp_path_factory.mktemp("inputs")
    for name in ("noeos", "notok"):
        shutil.copytree(TINY, place / name)
    for file in (place / "notok").glob("*token*"):
        file.unlink()
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        tree = json.loads((place / "noeos" / name).read_text())
        kept = {key: value for key, value in tree.items() if "eos" not in key and "pad" not in key}
        (place / "noeos" / name).write_text(json.dumps(kept))
    (place / "syntax.py").write_text("def score(prompts, completions:\n    pass\n")
    (place / "rewards.py").write_text(
        "def score(prompts, completions, **_): return [1.0]\n"
        "def odd(a, b): return 1\n"
        "def broken(prompts, completions, **_): return 1 / 0\n"
    )
    (place / "empty.jsonl").write_text("")
    (place / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}" * 300, "answer": "1"}) + "\n" for i in range(4))
    )
    (place / "bad.yaml").write_text("train: {steps: [\n")
    (place / "unknown.yaml").write_text("trian: {steps: 3}\nsede: 1\n")
    (place / "file").write_text("")
    return place


BAD = {
    "--model ./nowhere": "model './nowhere': no such folder",
    "--model tinny": "unknown model 'tinny'; did you mean 'tiny'?",
    "--model no-such/model": "model 'no-such/model' is no folder here, nor in the cache",
    "--model notok": "model 'notok' comes without a tokenizer: expected tokenizer.json",
    "--model ./noeos": "model './noeos': its tokenizer has no end-of-sequence token",
    "--task arithmetik": "unknown task 'arithmetik'; did you mean 'arithmetic'?",
    "--task empty.jsonl --set task.reward=exact": "empty.jsonl is empty: expected one JSON object",
    "--task long.jsonl --set task.reward=exact": "prompts are longer than 32 tokens",
    "--task long.jsonl --set task.reward=exact --set max_prompt=900": "context of 256",
    "--set task.reward=syntax.py:score": "syntax.py, line 1: '(' was never closed",
    "--set task.reward=rewards.py:scor": "has no function 'scor'; did you mean 'score'?",
    "--set task.reward=rewards.py:odd": "takes (a, b); expected TRL's signature",
    "--set task.reward=rewards.py:broken": "ZeroDivisionError: division by zero (rewards.py:3)",
    "--method grpo --set advantage=gae": "and this recipe trains none: value=value_loss adds one",
    "--set model.lora.lora_dropout=0.1": "lora_dropout=0.1 has no effect: models are sampled and",
    "--set lrr=1": "unknown setting 'lrr'; did you mean 'lr'?",
    "bad.yaml": "bad.yaml:2: expected the node content",
    "unknown.yaml": "'trian'; did you mean 'train'?; unknown setting 'sede'; did you mean 'seed'?",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_costs_one_line_and_leaves_nothing(words, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = words.replace("--model notok", f"--model {inputs / 'notok'}").split()
    out = tmp_path / "deep" / "run"
    code = main([*command(out), "--set", "max_prompt=32", *arguments])
    told = capsys.readouterr()
    wanted = BAD[words].replace("'notok'", f"'{inputs / 'notok'}'")
    assert (code, told.err.count("\n")) == (2, 1)
    assert wanted in told.err
    assert "Traceback" not in told.out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("out", ["file", "file/run", "/proc/run"])
def test_a_place_that_cannot_be_a_folder(out, inputs, monkeypatch, capsys):
    monkeypatch.chdir(inputs)
    assert main(command(Path(out))) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"proxpo: out: {out} ")
    assert told.count("\n") == 1
    assert (inputs / "file").read_text() == ""


# What is shown -------------------------------------------------------------------------------


def test_a_log_is_plain_lines(tmp_path, capsys):
    assert main([*command(tmp_path / "run"), "--set", "steps=2", "--set", "evaluate.every=1"]) == 0
    told = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in told)
    steps = [line for line in told.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"]
    assert "reward" in steps[0]
    assert "accuracy" in steps[0]


BONUS = "def score(completions, **kwargs): return [0.1] * len(completions)\n"


def test_a_bonus_for_the_format_is_no_accuracy(tmp_path, capsys):
    """0.1 for every response: a reward of 0.1 everywhere, and 100 % nowhere."""
    (tmp_path / "bonus.py").write_text(BONUS)
    sets = [f"task.reward={tmp_path / 'bonus.py'}:score", "steps=1", "evaluate.k=2"]
    words = [word for one in sets for word in ("--set", one)]
    assert main([*command(tmp_path / "run"), *words]) == 0
    told = capsys.readouterr().out
    assert "held-out reward 0.100 -> 0.100 greedy (no accuracy: the reward function" in told
    assert "%" not in told
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["accuracy_after"], summary["sampled_after"]) == (None, None)
    assert summary["reward_after"] == pytest.approx(0.1)
    rows = rows_of(tmp_path / "run")
    assert not [name for row in rows for name in row if "accuracy" in name or "pass@" in name]
    assert rows[-1]["proxpo/eval/reward@2"] == pytest.approx(0.1)
    assert "Validation reward" in [title for title, *_ in panels(rows)]
    assert "Validation accuracy" not in [title for title, *_ in panels(rows)]
    run = read_run(tmp_path / "run")
    assert pick_variant(SCORE, [run]).variant.label == "greedy reward, held out"
    state = state_of(tmp_path / "run", steps=1, score="proxpo/eval/accuracy")
    assert (state.status, state.score) == ("done", pytest.approx(0.1))


def test_the_curves_of_a_picture_end_below_its_edge():
    rows = [{"step": i + 1, "completions/mean_length": 100 + i % 2} for i in range(9)]
    (axis,) = draw_run(rows, title="a run").axes
    bottom, top = axis.get_ylim()
    assert bottom == 0
    assert top > 1.04 * 101


def test_what_is_right_can_be_set(tmp_path, capsys):
    (tmp_path / "bonus.py").write_text(BONUS)
    sets = [f"task.reward={tmp_path / 'bonus.py'}:score", "steps=1", "task.correct_above=0.05"]
    assert main([*command(tmp_path / "run"), *(w for one in sets for w in ("--set", one))]) == 0
    assert "accuracy 100.0 % -> 100.0 % greedy" in capsys.readouterr().out
    row = rows_of(tmp_path / "run")[-1]
    assert (row["proxpo/eval/accuracy"], row["proxpo/train_accuracy"]) == (1.0, 1.0)


def test_answers_in_brackets_are_shown_as_they_are(tmp_path, capsys):
    """LaTeX opens a formula with a backslash and a bracket; rich's markup has both too."""
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": r"\[x][/b]"}) for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    sets = [f"task={tmp_path / 'sums.jsonl'}", "task.reward=exact", "steps=1", "evaluate.k=0"]
    assert main([*command(tmp_path / "run"), *(w for one in sets for w in ("--set", one))]) == 0
    told = capsys.readouterr().out
    assert r"\[x][/b]" in told
    assert " greedy, KL" in told  # nothing was sampled


def test_a_run_says_what_is_held_out_and_what_did_not_act(tmp_path, capsys):
    sets = ["--set", "steps=1", "--method", "palu"]
    assert main([*command(tmp_path / "run"), *sets]) == 0
    told = capsys.readouterr().out
    assert "held out: 500 questions, 0 of them also in training" in told
    assert "different problems\n" in told
    assert "palu learns from problems that come again, and none did: more train.steps" in told
    assert "palu: its budget never departed from the even share" in told


# Presets -------------------------------------------------------------------------------------

WORD_PROBLEMS = [
    {"question": f"Ann has {a} pens and buys {b}. How many?", "answer": f"{a}+{b}\n#### {a + b}"}
    for a, b in ((2, 3), (4, 1), (5, 5), (7, 2), (3, 3), (8, 1))
]


@pytest.mark.parametrize("name", ["isopo-gsm8k-qwen3-0.6b", "kpo-long-responses"])
def test_presets_for_a_gpu_run_when_shrunk(name, tmp_path):
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in WORD_PROBLEMS)
        (tmp_path / f"{split}.jsonl").write_text(text)
    sets = ["prompts_per_step=4", "samples_per_prompt=2", "max_prompt=200", "max_tokens=6"]
    sets += ["evaluate.size=4", "micro_batch=2", "steps=2", "model.dtype=auto"]
    where = {"model": "tiny", "task": f"gsm8k:{tmp_path}", "out": str(tmp_path / "run")}
    summary = train(load_config(name, sets, overrides=where))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2]["grad_norm"] is not None
    assert summary["sampled_after"] is None  # greedy alone, as the presets ask
    assert summary["kl"] is not None


def test_smollm2_takes_a_step(tmp_path):
    """The real model, through an adapter so that a checkpoint is small."""
    assert "smollm2-arithmetic" in presets()
    sets = ["prompts_per_step=1", "samples_per_prompt=2", "evaluate.size=1", "evaluate.k=0"]
    sets += ["steps=1", "updates_per_rollout=1", "max_tokens=4", "model.lora.r=2"]
    sets += ["model.device=cpu", "overlap=8"]
    overrides = {"out": str(tmp_path / "run")}
    summary = train(load_config("smollm2-arithmetic", sets, overrides=overrides))
    assert summary["steps"] == 1
    assert any(char.isdigit() for char in summary["samples"][0]["before"])
