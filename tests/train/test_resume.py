"""Resuming: a run keeps what it is; every other setting takes effect or is refused."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs.old_form import in_old_form
from train.train_runs import config_of, curve, job_of, rows_of, weights_of

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.models import TINY
from proxpo.optimizers import NAMES
from proxpo.report.text import size_text
from proxpo.runs.checkpoint import Checkpoint, load_latest
from proxpo.train.config import as_dict, build_config, check_resume, differences, explain
from proxpo.train.faults import Progress
from proxpo.train.job import restore, save
from proxpo.train.language import LanguageJob as Job
from proxpo.train.loop import train
from proxpo.train.observer import Observer
from proxpo.train.resume import begin_anew
from proxpo.train.saving import Saver
from proxpo.train.sources import SOURCES, fingerprints

pytestmark = pytest.mark.long
GRPO = {"method": "grpo"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps that has reached its end."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(config_of(out, "steps=2", "checkpoint.every=1", **GRPO))
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    return out


def test_a_run_without_a_checkpoint_begins_anew_with_its_own_settings(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    before, text = rows_of(run)[-1]["reward"], (run / "config.yaml").read_text()
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert "has no checkpoint: it begins anew" in capsys.readouterr().out
    assert rows_of(run)[-1]["reward"] == before
    apart = set(text.splitlines()) ^ set((run / "config.yaml").read_text().splitlines())
    assert all(line.startswith("out:") for line in apart)


@pytest.mark.parametrize(
    "words", ["--method isopo", "--set seed=3", "--set out=", "--set task=arithmetic:hard"]
)
def test_a_run_without_a_checkpoint_keeps_what_it_is(words, run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    where = (
        ["--set", f"out={run}"] if words == "--set out=" else ["--out", str(run), *words.split()]
    )
    kept = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}
    assert main(["train", "--resume", *where]) == 2
    told = capsys.readouterr().err
    assert "a run keeps what it was started with" in told
    assert told.count("\n") == 1
    assert {f: f.read_bytes() for f in kept} == kept


def test_an_empty_config_without_a_checkpoint_is_not_continued(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    assert main(["train", "--resume", "--out", str(tmp_path)]) == 2
    assert "config.yaml is empty, and no checkpoint beside it" in capsys.readouterr().err


def test_a_folder_without_a_run_is_not_continued(tmp_path, capsys):
    assert main(["train", "--resume", "--out", str(tmp_path / "typo")]) == 2
    assert "typo holds no run to continue" in capsys.readouterr().err
    notices: list[str] = []  # of settings that say what to begin
    begin_anew(tmp_path / "typo", config_of(tmp_path / "typo"), notices.append)
    assert notices == [f"{tmp_path / 'typo'} holds no run to continue: a new one begins"]
    assert not (tmp_path / "typo").exists()


@pytest.fixture(scope="module")
def local_files(tmp_path_factory) -> Path:
    """A model, problems and a reward in files, and a run of one step that read them."""
    folder = tmp_path_factory.mktemp("local")
    shutil.copytree(TINY, folder / "model")
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(100, 140)]
    (folder / "problems.jsonl").write_text("\n".join(lines))
    reward = "def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
    (folder / "reward.py").write_text(reward)
    train(local_config(folder, "steps=1"))
    return folder


def local_config(folder: Path, steps: str):
    given = {**GRPO, "task": str(folder / "problems.jsonl"), "model": str(folder / "model")}
    reward = f"task.reward={folder / 'reward.py'}:score"
    return config_of(folder / "run", steps, "checkpoint.every=1", reward, **given)


@pytest.mark.parametrize("file", ["model/model.safetensors", "problems.jsonl", "reward.py"])
def test_a_run_does_not_go_on_with_other_files(file, local_files):
    path, run = local_files / file, local_files / "run"
    before = path.read_bytes()
    assert list(json.loads((run / SOURCES).read_text())) == [
        str(local_files / name)
        for name in ("model/model.safetensors", "problems.jsonl", "reward.py")
    ]
    kept = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}
    try:
        path.write_bytes(before + b"\n")
        with pytest.raises(ProxpoError, match=f"^{path} has changed since this run began;"):
            train(local_config(local_files, "steps=2"), resume=True)
    finally:
        path.write_bytes(before)
    assert {f: f.read_bytes() for f in kept} == kept


def test_a_run_goes_on_with_the_same_files_and_without_a_record(local_files, tmp_path):
    sources = local_files / "run" / SOURCES
    recorded = sources.read_bytes()
    assert train(local_config(local_files, "steps=2"), resume=True)["steps"] == 2
    assert sources.read_bytes() == recorded
    sources.unlink()
    assert train(local_config(local_files, "steps=3"), resume=True)["steps"] == 3
    sources.write_bytes(recorded)


def files_of(config) -> list[str]:
    return list(fingerprints(config.model.name, config.task))


def test_the_files_of_a_run_are_found_by_its_settings(tmp_path, monkeypatch):
    for name in ("model/a.safetensors", "tiny/a.safetensors", "gsm8k/train.jsonl", "test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = lambda *sets, **given: files_of(config_of(tmp_path, *sets, **given))  # noqa: E731
    assert names(model="tiny") == []
    assert names(model="~/model") == ["~/model/a.safetensors"]
    assert names(task="gsm8k:gsm8k") == ["gsm8k/train.jsonl"]
    assert names("task.options.path=gsm8k", task="gsm8k") == ["gsm8k/train.jsonl"]
    assert names("task.options.test=test.jsonl", task="./test.jsonl") == ["test.jsonl"]


def test_a_large_file_is_known_by_its_size_and_three_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("proxpo.train.sources.WHOLE", 80)
    monkeypatch.setattr("proxpo.train.sources.PART", 10)
    model, config = tmp_path / "model", config_of(tmp_path, model=str(tmp_path / "model"))
    model.mkdir()

    def digest(size: int, at: int | None = None) -> str:
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        (model / "a.safetensors").write_bytes(data)
        return fingerprints(config.model.name, config.task)[f"{model}/a.safetensors"]

    assert len({digest(100), digest(101), digest(100, 5), digest(100, 55), digest(100, 95)}) == 5
    assert digest(100) == digest(100, 30), "between the parts"
    assert digest(80) != digest(80, 30), "read whole"


# Another value for every setting -------------------------------------------------------------

OTHER = {
    "seed": 1,
    "out": "elsewhere",
    "method": "isopo",
    "recipe": {"clip_high": 0.3},
    "model.name": "smollm2",
    "model.options": {"hidden": 8},
    "model.device": "cpu",
    "model.dtype": "float64",
    "model.gradient_checkpointing": True,
    "model.lora": {"r": 2},
    "task.name": "arithmetic:hard",
    "task.options": {"held_out": 64},
    "task.problems": 64,
    "task.correct_above": 0.5,
    "task.reward": "reward.py:score",
    "task.reward_workers": 3,
    "task.reward_timeout": 3.0,
    "task.reward_memory": 1.5,
    "task.reward_max_failed": 0.25,
    "task.drop_long": True,
    "rollout.backend": "vllm",
    "rollout.options": {"max_rows": 3},
    "rollout.prompts_per_step": 6,
    "rollout.samples_per_prompt": 2,
    "rollout.max_prompt": 64,
    "rollout.max_tokens": 6,
    "rollout.temperature": 1.5,
    "rollout.top_p": 0.9,
    "rollout.thoughts": 2,
    "train.steps": 7,
    "train.updates_per_rollout": 2,
    "train.mini_batches": 2,
    "train.micro_batch": 3,
    "train.graphs": "off",
    "train.optimizer": "muon",
    "train.optimizer_options": {"betas": [0.8, 0.9]},
    "train.lr": 1e-3,
    "train.weight_decay": 0.5,
    "train.grad_clip": 0.1,
    "train.lr_schedule": "cosine",
    "train.warmup_steps": 9,
    "train.train_temperature": 2.0,
    "train.off_policy_lag": 1,
    "train.replay_share": 0.5,
    "train.on_no_signal": "warn",
    "evaluate.every": 3,
    "evaluate.size": 3,
    "evaluate.k": 2,
    "checkpoint.every": 3,
    "checkpoint.keep": 5,
    "checkpoint.grace": 1.0,
    "log.sinks": ["tensorboard"],
    "log.project": "other",
    "log.samples": 1,
    "log.batch_every": 2,
    "log.pictures": True,
}
KINDS = {one.path: one.resume for one in explain()}


def changed(config, path: str):
    """The config with another value for one setting."""
    tree = as_dict(config)
    section, _, name = path.rpartition(".")
    (tree[section] if section else tree)[name] = OTHER[path]
    if path == "method":
        tree["recipe"] = {}
    return build_config(tree)


def test_every_setting_says_what_a_change_does_on_resuming():
    assert set(OTHER) == set(KINDS)
    assert set(KINDS.values()) == {"fixed", "next", "now"}
    fixed = {path for path, kind in KINDS.items() if kind == "fixed"}
    assert {"method", "recipe", "seed", "model.name", "task.name", "task.options"} <= fixed


@pytest.mark.parametrize("path", OTHER)
def test_a_change_is_refused_or_applied_and_recorded(path, finished, tmp_path):
    before = config_of(finished, "steps=2", "checkpoint.every=1", **GRPO)
    after, where = changed(before, path), finished / "checkpoints/step-2"
    [change] = differences(before, after)
    assert (change.path, change.resume) == (path, KINDS[path])
    if KINDS[path] == "fixed":
        with pytest.raises(ProxpoError) as caught:
            check_resume(before, after, step=1, where=where)
        told = str(caught.value)
        assert "\n" not in told
        assert told.startswith(f"{where} does not fit these settings ({change})")
        assert "--out DIR begins a new one" in told
        return
    assert check_resume(before, after, step=1, where=where) == [change]
    if KINDS[path] == "next" and path != "train.steps":
        with pytest.raises(ProxpoError, match=r"end of a finished run, so a change has no effect"):
            check_resume(before, after, step=2, where=where)
    else:
        assert check_resume(before, after, step=2, where=where) == [change]
    if path in ("rollout.backend", "out"):  # vLLM is not in this environment
        return
    restored = resumed_job(finished, after)
    fresh = job_with(after)
    try:
        assert facts(restored) == facts(fresh), "the checkpoint's value has won"
        assert [one["setting"] for one in restored.changes] == [path]
    finally:
        restored.close()
        fresh.close()


def job_with(config) -> Job:
    from proxpo.train.language import build_language_job

    return build_language_job(config)


def resumed_job(out: Path, config) -> Job:
    checkpoint = load_latest(out / "checkpoints")
    job = job_with(config)
    restore(job, checkpoint, differences(build_config(checkpoint.info["config"]), config))
    return job


def facts(job: Job) -> list:
    """Everything a job was built with that a checkpoint could have overwritten."""
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "lr", "base_lr")}
        | {"lr": group.get("base_lr", group["lr"])}
        for group in job.learner.optimizer.param_groups
    ]
    pool = (job.pool.timeout, job.pool.memory, job.pool.max_failed, job.pool._size)
    recipe = [(kind, stage.name, stage.options) for kind, stage in job.learner.recipe.stages()]
    exam = replace(job.exam, problems=[])
    rows = job.sampler._max_rows
    return [job.config, groups, pool, recipe, exam, rows, job.policy.dtype, job.clock.steps]


# Identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["--method isopo", "--set seed=3", "--task calculator", "--set clip_high=0.3", "--set lr=1e-4"],
)
def test_a_finished_run_is_not_relabelled(words, run, capsys):
    kept = {f: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}
    assert main(["train", "--out", str(run), "--resume", *words.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--out DIR begins a new one" in told
    assert {f: f.read_bytes() for f in kept} == kept


def test_explain_says_what_a_change_does_on_resuming(capsys):
    assert main(["train", "--explain"]) == 0
    told = capsys.readouterr().out
    assert "on resume" in told
    line = next(line for line in told.splitlines() if line.startswith("train.lr "))
    assert "next step" in line
    line = next(line for line in told.splitlines() if line.startswith("seed "))
    assert "refused" in line


# What a checkpoint holds ---------------------------------------------------------------------


@pytest.mark.parametrize("sets", [(), ("model.lora.r=2",)], ids=["whole", "adapter"])
def test_a_checkpoint_holds_the_weights_once_and_is_announced(sets, tmp_path):
    """One file of them, which transformers loads, beside AdamW's two moments; none of step 0."""
    notes: list[str] = []
    observer = Observer(on_notice=notes.append)
    train(config_of(tmp_path, "steps=2", *sets, **GRPO), observer=observer)
    assert os.listdir(tmp_path / "checkpoints") == ["step-2"]
    folder = tmp_path / "checkpoints/step-2"
    weights = weights_of(tmp_path, 2)
    trained = sum(value.nbytes for value in weights.values())
    held = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert 3 * trained < held < 3.1 * trained + 20_000
    for name, value in weights.items():
        assert value.dtype == torch.float32, name
    [said] = [note for note in notes if note.startswith("a checkpoint takes about ")]
    assert said.startswith(f"a checkpoint takes about {size_text(3 * trained)[:4]}")
    again = resumed_job(tmp_path, config_of(tmp_path, "steps=2", *sets, **GRPO))
    own = dict(again.policy.model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in weights.items())
    again.close()


def test_a_run_goes_on_from_a_checkpoint_of_the_old_form(run, tmp_path):
    shutil.copytree(run, tmp_path / "old")
    in_old_form(tmp_path / "old/checkpoints/step-2")
    for out in (run, tmp_path / "old"):
        train(config_of(out, "steps=4", "checkpoint.every=1", **GRPO), resume=True)
    assert curve(run) == curve(tmp_path / "old")
    new, old = weights_of(run, 4), weights_of(tmp_path / "old", 4)
    assert all(torch.equal(old[name], value) for name, value in new.items())


@pytest.mark.parametrize(
    ("sets", "there", "needed"),
    [
        (("checkpoint.every=0",), 0, 1),
        (("checkpoint.every=4", "checkpoint.keep=1"), 0, 2),  # the new one before the old one goes
        (("checkpoint.every=1", "checkpoint.keep=2"), 0, 3),
        (("checkpoint.every=1", "checkpoint.keep=5"), 0, 6),
        (("checkpoint.every=4", "checkpoint.keep=9"), 0, 3),
        (("checkpoint.every=1", "checkpoint.keep=2"), 2, 1),
        (("checkpoint.every=1", "checkpoint.keep=2"), 5, 1),
        (("checkpoint.keep=0",), 0, 0),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_before_the_first_step(
    sets, there, needed, tmp_path, monkeypatch
):
    job = job_of(tmp_path, "steps=10", *sets, **GRPO)
    for step in range(there):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    notes: list[str] = []
    saver = Saver(job, tmp_path / "checkpoints", Progress(), notes.append)
    size = saver.size()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed * size))
    saver.announce()
    assert len(notes) == (needed > 0)
    if needed:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: usage._replace(free=needed * size - 1)
        )
        with pytest.raises(ProxpoError, match=r"take about .* are free: make room") as caught:
            saver.announce()
        assert "\n" not in str(caught.value)
    job.close()


def test_a_copy_that_memory_has_no_room_for_is_not_made(run, monkeypatch):
    """The checkpoint is written between the steps, with the same bits."""
    notes: list[str] = []
    monkeypatch.setattr("proxpo.train.saving.host_memory", lambda: 1 << 20)
    observer = Observer(on_notice=notes.append)
    sets = ("steps=3", "checkpoint.every=1")
    train(config_of(run, *sets, **GRPO), resume=True, observer=observer)
    assert any("written between the steps, since 1.0 MiB of memory are free" in n for n in notes)
    assert load_latest(run / "checkpoints").step == 3
    assert any(note.startswith("checkpoint of step 3: ") for note in notes)


# Rate and decay ------------------------------------------------------------------------------


def test_a_new_rate_and_decay_take_effect_and_are_recorded(run):
    sets = ("steps=4", "checkpoint.every=1", "lr=1e-3", "weight_decay=0.3")
    notes: list[str] = []
    summary = train(
        config_of(run, *sets, **GRPO), resume=True, observer=Observer(on_notice=notes.append)
    )
    assert [row["learning_rate"] for row in rows_of(run)[1:]] == [5e-4, 5e-4, 1e-3, 1e-3]
    [group] = load_latest(run / "checkpoints").parts["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.3)
    recorded = [(one["step"], one["setting"], one["after"]) for one in summary["changes"]]
    assert recorded == [
        (2, "train.steps", 4),
        (2, "train.lr", 1e-3),
        (2, "train.weight_decay", 0.3),
    ]
    assert any("train.lr: 0.0005 -> 0.001" in note for note in notes)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_rate_reaches_every_group_of_every_optimizer(name, tmp_path):
    sets = [f"optimizer={name}", "lr_schedule=cosine", "steps=4"]
    if name == "muon":
        sets.append("train.optimizer_options.rest.lr=1e-6")
    job = job_of(tmp_path, *sets, **GRPO)
    for group in job.learner.optimizer.param_groups:  # as a step at half the rate leaves them
        group["base_lr"], group["lr"] = group["lr"], group["lr"] / 2
    checkpoint = saved(job, tmp_path)
    again = job_of(tmp_path, *sets, "lr=8e-4", "weight_decay=0.25", **GRPO)
    restore(again, checkpoint)
    rates = [group["lr"] for group in again.learner.optimizer.param_groups]
    decays = {group["weight_decay"] for group in again.learner.optimizer.param_groups}
    expected = [4e-4, 5e-7] if name == "muon" else [4e-4] * len(rates)
    assert rates == pytest.approx(expected)
    assert decays == {0.25}
    job.close()
    again.close()


def saved(job: Job, out: Path) -> Checkpoint:
    job.before = {"metrics": {}, "answers": []}
    save(job, out / "checkpoints")
    return load_latest(out / "checkpoints")


# Lag -----------------------------------------------------------------------------------------


def test_a_smaller_lag_works_off_what_waits(tmp_path):
    sets = ("steps=5", "checkpoint.every=1", "off_policy_lag=2")
    stop = Observer(on_step=lambda step, _: step == 2 and os.kill(os.getpid(), signal.SIGTERM))
    assert train(config_of(tmp_path, *sets, **GRPO), observer=stop)["steps"] == 2
    config = config_of(tmp_path, *sets[:2], "off_policy_lag=0", **GRPO)
    train(config, resume=True)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert ["reward" in row for row in rows[1:]] == [True, True, False, False, True]
    assert [row["num_tokens"] for row in rows[2:5]] == [rows[2]["num_tokens"]] * 3
    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").open()]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]  # the steps that train on them
    job = resumed_job(tmp_path, config)
    assert job.waiting == []
    job.close()


def test_num_tokens_counts_every_lagged_rollout(tmp_path):
    """Without learning, rollouts of a lag are those of the steps they belong to."""
    train(config_of(tmp_path / "lag", "off_policy_lag=2", "steps=1", "lr=0", **GRPO))
    train(config_of(tmp_path / "none", "steps=3", "lr=0", **GRPO))
    assert rows_of(tmp_path / "lag")[1]["num_tokens"] == rows_of(tmp_path / "none")[3]["num_tokens"]


# History -------------------------------------------------------------------------------------


def test_the_report_of_a_run_with_lost_rows_says_so(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[2])
    notes: list[str] = []
    sets = ("steps=3", "checkpoint.every=1", "lr=1e-4", "log.pictures=true")
    summary = train(
        config_of(run, *sets, **GRPO), resume=True, observer=Observer(on_notice=notes.append)
    )
    assert summary["missing_steps"] == "1"
    assert sum("has no row of step 1:" in note for note in notes) == 2
    page = (run / "report.html").read_text()
    assert "(no rows of step 1)" in page
    assert "train.lr changed after step 2: 0.0005 -&gt; 0.0001" in page
    from proxpo.report.read_runs import read_run

    assert [note.split(": ", 1)[-1] for note in read_run(run).notes] == [
        f"{run}/metrics.jsonl has no row of step 1",
        "train.steps changed after step 2: 2 -> 3",
        "train.lr changed after step 2: 0.0005 -> 0.0001",
        "log.pictures changed after step 2: False -> True",
    ]


def test_a_damaged_manifest_costs_the_checkpoint_not_the_run(run, capsys):
    (run / "checkpoints/step-2/manifest.json").write_text("[]")
    assert main(["train", "--out", str(run), "--resume", "--set", "checkpoint.keep=1"]) == 0
    told = capsys.readouterr()
    assert "damaged checkpoint passed over: step-2: manifest.json is damaged: expected" in told.out
    assert os.listdir(run / "checkpoints") == ["step-2"]
    assert load_latest(run / "checkpoints").step == 2


# Stop signals --------------------------------------------------------------------------------


def in_evaluation(number: int, **callbacks) -> Observer:
    """An observer that sends SIGTERM in the middle of the evaluation after a step."""
    begun, sent = [0], []

    def on_progress(phase: str, done: int, total: int) -> None:
        if phase != "evaluating" or sent:
            return
        if (done, total) == (0, 1):
            begun[0] += 1
        elif begun[0] == number:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    return Observer(on_progress=on_progress, **callbacks)


EXAMINED = ("steps=2", "evaluate.every=1", "evaluate.k=2", "evaluate.size=6")


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "run"
    train(config_of(out, *EXAMINED, **GRPO))
    return out


@pytest.mark.parametrize("step", [1, 2])
def test_a_signal_inside_an_evaluation_loses_nothing(step, straight, tmp_path):
    """The evaluation is given up at once and made after resuming, the last one too."""
    config = config_of(tmp_path, *EXAMINED, **GRPO)
    ended = train(config, observer=in_evaluation(step))
    assert ended == {"stopped": "SIGTERM", "steps": step, "out": str(tmp_path)}
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(step)), "its row is not written"
    assert train(config, resume=True, observer=in_evaluation(1)) == ended, "stopped there once more"
    assert "stopped" not in train(config, resume=True)
    assert curve(tmp_path) == curve(straight)
    expected, weights = weights_of(straight, 2), weights_of(tmp_path, 2)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_signal_inside_the_first_evaluation_leaves_nothing(tmp_path):
    notes: list[str] = []
    out = tmp_path / "run"
    observer = in_evaluation(0, on_notice=notes.append)
    ended = train(config_of(out, *EXAMINED, **GRPO), observer=observer)
    assert ended == {"stopped": "SIGTERM", "steps": 0, "out": str(out)}
    assert "stopped by SIGTERM before the first step; nothing was saved" in notes
    assert not out.exists()


def test_an_update_that_does_not_end_is_given_up_after_the_grace(tmp_path):
    """The last checkpoint counts, and the steps since come again."""

    waited_out: list[str] = []
    made = [0]

    def on_progress(phase: str, *_: int) -> None:
        if phase == "updating" and made[-1] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
            waited_out.append(phase)

    sets = ("steps=3", "checkpoint.every=1", "checkpoint.grace=0.2")
    notes: list[str] = []
    observer = Observer(
        on_progress=on_progress, on_notice=notes.append, on_step=lambda step, _: made.append(step)
    )
    ended = train(config_of(tmp_path, *sets, **GRPO), observer=observer)
    assert not waited_out
    assert ended == {"stopped": "SIGTERM", "steps": 1, "out": str(tmp_path)}
    assert notes[-2:] == [
        "SIGTERM: the run stops within 0.2 s; a second SIGTERM ends it at once",
        "stopped by SIGTERM after step 1, in the update of step 2; --resume continues from there",
    ]
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    config = config_of(tmp_path, *sets, **GRPO)
    train(config, resume=True, observer=Observer(on_notice=notes.append))
    assert "continues after step 1 of 3" in notes
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3]


def test_a_second_ctrl_c_names_the_step_that_is_kept(run):
    def on_progress(phase: str, *_: int) -> None:
        if phase == "updating":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    notes: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        config = config_of(run, "steps=4", **GRPO)
        observer = Observer(on_progress=on_progress, on_notice=notes.append)
        with pytest.raises(KeyboardInterrupt):
            train(config, resume=True, observer=observer)
    finally:
        signal.signal(signal.SIGINT, before)
    assert notes[-1] == "ended at once; --resume continues after step 2"


def test_resuming_a_finished_run_says_so(run, capsys):
    assert main(["train", "--resume", "--out", str(run)]) == 0
    assert "all steps are done already, 2 of 2; --set steps=N" in capsys.readouterr().out


@pytest.mark.parametrize("pictures", ["true", "false"])
def test_a_finished_run_without_metrics_keeps_its_end(pictures, run, capsys):
    """There is nothing to draw, and no step is due: the summary stays, and no error comes."""
    before = json.loads((run / "summary.json").read_text())
    (run / "metrics.jsonl").unlink()
    words = ["train", "--resume", "--out", str(run), "--set", f"log.pictures={pictures}"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert ("no new curves.png and report.html" in told.out) == (pictures == "true")
    after = json.loads((run / "summary.json").read_text())
    for key in ("steps", "accuracy_before", "accuracy_after", "tokens", "kl"):
        assert after[key] == before[key]


def test_an_error_in_a_picture_ends_no_run(run, monkeypatch, capsys):
    def broken(*_, **__):
        raise ZeroDivisionError("no\npanel")

    monkeypatch.setattr("proxpo.train.picture.draw_run", broken)
    words = ["train", "--resume", "--out", str(run), "--set", "log.pictures=true"]
    assert main([*words, "--set", "steps=3"]) == 0
    assert "no curves.png and report.html: ZeroDivisionError('no" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_the_end_of_a_finished_run_stays_until_a_step_is_due(run):
    kept = (run / "summary.json").read_bytes()
    sets = ("steps=2", "checkpoint.every=1")
    observer = in_evaluation(0)
    assert train(config_of(run, *sets, **GRPO), resume=True, observer=observer)["steps"] == 2
    assert json.loads((run / "summary.json").read_bytes())["steps"] == 2
    seen: list[bool] = []

    def on_progress(phase: str, *_: int) -> None:
        if phase != "loading":
            seen.append((run / "summary.json").exists())

    hook = Observer(on_progress=on_progress)
    (run / "summary.json").write_bytes(kept)
    train(config_of(run, *sets, **GRPO), resume=True, observer=hook)
    assert all(seen)
    seen.clear()
    train(config_of(run, "steps=3", "checkpoint.every=1", **GRPO), resume=True, observer=hook)
    assert not any(seen)
