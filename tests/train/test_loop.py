"""The whole trainer on the model in the box: it learns, it survives, it refuses."""

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.train_runs import curve, job_of, rows_of, sample, weights_of

from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.train.batch import UpdatePlan
from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.observer import Observer

SMALL = [
    "prompts_per_step=4",
    "samples_per_prompt=4",
    "rollout.max_tokens=5",
    "evaluate.size=8",
    "evaluate.k=2",
    "evaluate.every=0",
    "checkpoint.every=0",
    "log.pictures=false",  # drawing takes longer than these runs
]


def config_of(out: Path, *sets: str, **overrides):
    return load_config(None, [*SMALL, *sets], overrides={"out": str(out), **overrides})


MARKS = """
def score(solution_str, ground_truth):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "spans": [[0, 99, 1.0 if right else -1.0]]}
"""
# Two thoughts stand for digits that the model in the box would write: the last two are asked for.
THOUGHTS = ("easiest=none", "sigma=0.5", "thoughts=2", "task.options.last=2")
# What a method needs beyond arithmetic and its defaults: turns, spans, a cheaper solver, or tokens
# where it was written for Gaussian policies.
SPECIAL = {
    "simpletir": ("task=calculator", "rollout.max_tokens=8"),
    "st-ppo": ("task=calculator", "rollout.max_tokens=8"),
    "grpo-guard": ("policy=tokens",),
    "lamer": ("task=arms", "rollout.max_tokens=1"),
    "foldact": ("task=dialogue", "task.options.parts=2", "rollout.max_tokens=1", "max_prompt=64"),
    "vlpo": THOUGHTS,
    "trpo": ("cg_iterations=3", "delta=0.001"),
    "mdpo": ("updates=2",),
    "proma": ("micro_batch=8",),
}


@pytest.mark.long
@pytest.mark.parametrize("slug", methods("language"))
def test_every_recipe_trains_the_model_in_the_box(slug, tmp_path):
    # The rate is small enough that 8 steps on 16 samples cannot undo what the model knows.
    file = tmp_path / "marks.py"
    file.write_text(MARKS)
    marks = (f"task.reward={file}:score",) if slug == "text2grad" else ()
    rate = () if slug == "trpo" else ("train.lr=1e-5",)  # TRPO has a radius instead
    special = (*SPECIAL.get(slug, ()), *marks, *rate)
    train(config_of(tmp_path, *special, "train.steps=8", method=slug))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(9))
    assert all(row["loss"] is not None and row["grad_norm"] is not None for row in rows[1:])
    rewards = [row["reward"] for row in rows[1:]]
    assert sum(rewards[4:]) >= sum(rewards[:4]) - 4 * 0.23  # the noise of 64 samples
    weights = weights_of(tmp_path, 8)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
    start = weights_of_start()
    assert any(not torch.equal(value, start[name]) for name, value in weights.items())


def weights_of_start() -> dict[str, torch.Tensor]:
    from proxpo.models import load_policy

    return dict(load_policy("tiny").model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize(
    "sets",
    [
        ("method=isopo",),
        ("method=isopo", "gradient.reg=1.0", "mini_batches=2", "micro_batch=3"),
        (
            "method=ppo",
            "off_policy_lag=2",
            "mini_batches=2",
            "kl_controller=horizon",
            "kl_coef=0.1",
        ),
        ("method=p3o-2019",),
        ("method=grpo", "replay_share=0.5", "optimizer=shampoo", "lr_schedule=cosine"),
        ("method=remix", "reset_at=4"),
        ("method=knapsack-rl", "task=calculator", "rollout.max_tokens=8"),
        ("method=vlpo", "noise=1", *THOUGHTS, "off_policy_lag=1"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(sets, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    sets = (*sets, "checkpoint.every=2", "evaluate.every=3")
    train(config_of(straight, *sets, "steps=5"))
    train(config_of(broken, *sets, "steps=5"), observer=_interrupt_after(3))
    train(config_of(broken, *sets, "steps=5"), resume=True)
    expected, found = weights_of(straight, 5), weights_of(broken, 5)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert curve(broken) == curve(straight)
    assert (broken / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()


def _interrupt_after(steps: int):
    def on_step(step: int, metrics: dict) -> None:
        if step == steps:
            os.kill(os.getpid(), signal.SIGTERM)

    return Observer(on_step=on_step)


def _train_in_child(out: str, steps: int) -> None:
    torch.set_num_threads(1)
    train(config_of(Path(out), f"steps={steps}", "checkpoint.every=1", method="isopo"), resume=True)


def test_killed_many_times_nothing_is_lost(tmp_path):
    """kill -9 at random moments, also inside the writing of a checkpoint; then on from there."""
    context = multiprocessing.get_context("forkserver")
    loaded = ["proxpo.train.loop", "transformers.models.qwen3.modeling_qwen3"]
    context.set_forkserver_preload([*loaded, "matplotlib.backends.backend_agg"])

    moments = random.Random(0)

    def run(out: Path, kill_after: int | None = None) -> int:
        """The exit code; killed a moment after so many rows, whatever the speed of the machine."""
        child = context.Process(target=_train_in_child, args=(str(out), 12))
        child.start()
        metrics = out / "metrics.jsonl"
        while kill_after is not None and child.is_alive():
            if metrics.exists() and len(metrics.read_bytes().splitlines()) >= kill_after:
                time.sleep(moments.uniform(0.0, 0.2))
                child.kill()
                break
            child.join(0.005)
        child.join()
        return child.exitcode

    assert run(tmp_path / "straight") == 0
    codes = [run(tmp_path / "killed", rows) for rows in (0, 2, 4, 7, 10)]
    assert codes.count(-signal.SIGKILL) >= 4  # the last one may be done before
    assert run(tmp_path / "killed") == 0
    expected, found = weights_of(tmp_path / "straight", 12), weights_of(tmp_path / "killed", 12)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert curve(tmp_path / "killed") == curve(tmp_path / "straight")


def test_two_runs_with_one_seed_give_one_curve_and_other_seeds_others(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(config_of(tmp_path / name, "steps=3", method="isopo", seed=seed))
    a, b, c = (curve(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


def test_the_run_leaves_what_it_promises(tmp_path):
    sets = ("steps=2", "evaluate.every=1", "log.pictures=true")
    summary = train(config_of(tmp_path, *sets, method="grpo"))
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "curves.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == summary["steps"] == 2
    page = (tmp_path / "report.html").read_text()
    assert "://" not in page  # works offline
    assert summary["samples"][0]["answer"] in page
    assert load_config(tmp_path / "config.yaml").method == "grpo"
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "checkpoints/step-2/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    saved = weights_of(tmp_path, 2)
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())


REWARDS = """
import os, signal, time
def hangs(solution_str, ground_truth):
    time.sleep(60) if solution_str.startswith("5") else None
    return 1.0
def crashes(solution_str, ground_truth):
    os.kill(os.getpid(), signal.SIGSEGV) if solution_str.startswith("5") else None
    return 1.0
def raises(solution_str, ground_truth):
    return 1.0 / (solution_str[:1] != "5")
def not_a_number(solution_str, ground_truth):
    return float("nan") if solution_str.startswith("5") else 1.0
"""


@pytest.mark.parametrize(
    ("function", "counted"),
    [("hangs", "timeout"), ("crashes", "error"), ("raises", "error"), ("not_a_number", "nan")],
)
def test_a_faulty_reward_is_counted_and_the_run_goes_on(function, counted, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    faulty = f"task.reward={file}:{function}"
    sets = ("steps=2", faulty, "reward_timeout=1", "reward_max_failed=1", "prompts_per_step=12")
    train(config_of(tmp_path / "run", *sets, method="grpo"))
    rows = rows_of(tmp_path / "run")[1:]
    assert sum(row[f"proxpo/reward_{counted}"] for row in rows) > 0
    assert all(row["reward"] == 1.0 for row in rows)  # the others count, the failed ones do not


def test_asking_for_fewer_steps_than_done_is_an_error(tmp_path):
    train(config_of(tmp_path, "steps=3", method="grpo"))
    with pytest.raises(ProxpoError, match="has done 3 steps already"):
        train(config_of(tmp_path, "steps=2", method="grpo"), resume=True)
    with pytest.raises(ProxpoError, match="already holds a run"):
        train(config_of(tmp_path, "steps=5", method="grpo"))


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path):
    sets = ("checkpoint.every=1", "checkpoint.keep=3")
    train(config_of(tmp_path, *sets, "steps=3", method="grpo"))
    (tmp_path / "checkpoints/step-3/weights.safetensors").write_bytes(b"\0" * 100)
    lines: list[str] = []
    train(
        config_of(tmp_path, *sets, "steps=4", method="grpo"),
        resume=True,
        observer=Observer(on_notice=lines.append),
    )
    assert any("step-3" in line and "damaged" in line for line in lines)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sets", "overrides", "message"),
    [
        ((), {"model": "tinny"}, "unknown model 'tinny'; did you mean 'tiny'"),
        ((), {"task": "arithmetik"}, "unknown task 'arithmetik'; did you mean 'arithmetic'"),
        (("rollout.max_prompt=3",), {}, "test prompts are longer than 3 tokens"),
        (("rollout.max_tokens=500",), {}, "exceeds the model's context of 256"),
        (("task.reward=nowhere.py:score",), {}, "nowhere.py"),
    ],
)
def test_bad_input_gets_one_clear_line(sets, overrides, message, tmp_path):
    with pytest.raises(ProxpoError, match=message) as caught:
        train(config_of(tmp_path / "run", *sets, "steps=1", **overrides))
    assert "\n" not in str(caught.value)


# A sum that comes after those of the penalty, which a gradient transform leaves out.
AFTER_THE_PENALTY = ("aggregate=guarded_token_mean", "updates_per_rollout=3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("slug", "sets"),
    [
        ("grpo", ()),
        ("p3o", ()),
        ("vlpo", ("noise=1", *THOUGHTS)),
        ("reinforce-pp", ("kl_coef=0",)),
        # The overlap set is drawn per micro-batch; without lengths there is none.
        ("isopo", ("p=0",)),
        ("p3o", ("gradient=isopo", "gradient.p=0", "gradient.q=-1", *AFTER_THE_PENALTY)),
    ],
)
def test_micro_batches_change_the_weights_by_rounding_alone(slug, sets, tmp_path):
    """Also for P3O, whose ESS is that of the whole batch, in its policy term and in its penalty."""
    quiet = ("steps=2", *sets)
    train(config_of(tmp_path / "whole", *quiet, method=slug))
    train(config_of(tmp_path / "cut", *quiet, "micro_batch=5", method=slug))
    whole, cut = rows_of(tmp_path / "whole")[-1], rows_of(tmp_path / "cut")[-1]
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-3)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=2e-3, abs=1e-6)


def test_old_log_probs_of_fresh_data_need_no_pass_of_their_own(tmp_path, monkeypatch):
    """One update on one's own samples: the shortcut gives the numbers of the separate pass."""
    train(config_of(tmp_path / "late", "steps=2", method="grpo"))
    plan = UpdatePlan.of
    early_plan = classmethod(
        lambda cls, *args, **named: replace(plan(*args, **named), defer_old=False)
    )
    monkeypatch.setattr(UpdatePlan, "of", early_plan)
    train(config_of(tmp_path / "early", "steps=2", method="grpo"))
    late, early = weights_of(tmp_path / "late", 2), weights_of(tmp_path / "early", 2)
    assert all(torch.equal(late[name], value) for name, value in early.items())


def test_a_run_without_checkpoints_writes_none_and_is_not_overwritten(tmp_path):
    config = config_of(tmp_path, "steps=1", "checkpoint.keep=0", method="grpo")
    assert train(config)["steps"] == 1
    assert not (tmp_path / "checkpoints").exists()
    for resume in (False, True):
        with pytest.raises(ProxpoError, match="finished run without checkpoints"):
            train(config, resume=resume)


def test_failed_rewards_do_not_make_a_prompt_mixed(tmp_path):
    """One response to each prompt has no reward, the other three earn the same."""
    (tmp_path / "some.py").write_text(
        "def score(completions, prompts, **_):\n"
        "    return [1.0 if i % 4 else None for i in range(len(completions))]\n"
    )
    job = job_of(tmp_path, f"task.reward={tmp_path / 'some.py'}:score", method="grpo")
    metrics = sample(job).metrics
    job.close()
    assert (metrics["proxpo/reward_nan"], metrics["reward_std"]) == (4, 0)
    assert metrics["frac_reward_zero_std"] == 1
