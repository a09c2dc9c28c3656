"""Runs on generative models and energies: kill and resume, baselines, learning, refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from proxpo.cli import main
from proxpo.errors import ProxpoError
from proxpo.generative.networks import WEIGHTS
from proxpo.generative.tasks import make_sample_task, ring
from proxpo.train.build import build_job
from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.update import update

DIGITS, MIXTURE, ENERGY = "digits:class=7", "mixture:right", "energy:two-modes"
SMALL = ["evaluate.size=8", "evaluate.every=0", "checkpoint.every=1", "train.steps=3"]
SMALL += ["rollout.max_tokens=4", "log.pictures=false"]
FEW = {
    "ac-flow": ["samples_per_step=8", "warmup=1"],
    "adjoint-sampling": ["samples_per_step=8", "batches=2", "batch=8", "buffer=2"],
    "dpok": ["samples_per_prompt=4", "buffer=40"],
}


def config_of(out: Path, task: str, method: str, *sets: str):
    overrides = {"out": str(out), "task": task, "method": method}
    few = FEW.get(method, ["samples_per_prompt=4"])
    return load_config(None, [*SMALL, *few, *sets], overrides=overrides)


RUNS = {
    "dpok": (DIGITS, "dpok", "train.off_policy_lag=1"),
    "grpo-guard": ("digits:ink", "grpo-guard", "kl_coef=0.1", "train.mini_batches=2"),
    "ppo": (MIXTURE, "ppo"),
    "ac-flow": (DIGITS, "ac-flow"),
    "adjoint": (ENERGY, "adjoint-sampling"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_killed_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(config_of(whole, *RUNS[name]))
    train(config_of(cut, *RUNS[name], "train.steps=2"))
    assert train(config_of(cut, *RUNS[name]), resume=True)["steps"] == 3
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if "time" not in k}
            for line in (out / "metrics.jsonl").read_text().splitlines()
        ]
        for out in (whole, cut)
    ]
    assert rows[0][-1] == rows[1][-1]
    one, two = (load_file(out / "checkpoints/step-3/weights.safetensors") for out in (whole, cut))
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    first = load_file(whole / "checkpoints/step-2/weights.safetensors")
    assert any(not torch.equal(value, first[key]) for key, value in one.items())


@pytest.mark.parametrize("method", ["grpo", "reinforce", "gspo"])
def test_recipes_of_language_models_train(method: str, tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, MIXTURE, method))
    before = [p.detach().clone() for p in job.learner.trainable()]
    metrics = update(job, job.collect(0).experience)
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert any(not torch.equal(p, q) for p, q in zip(before, job.learner.trainable()))


@pytest.mark.checks("grpo-guard", "trains a denoiser with its Gaussian policy; steps are rows")
def test_grpo_guard_in_its_own_setting(tmp_path: Path) -> None:
    job = build_job(config_of(tmp_path, MIXTURE, "grpo-guard", "dtype=float64"))
    assert job.learner.by_step
    rows = job.collect(0).experience
    step = job.model(rows.observations)
    torch.testing.assert_close(step.mean.detach(), rows.old_mean)
    torch.testing.assert_close(step.std, rows.noise)
    metrics = update(job, rows)
    assert metrics["loss"] == metrics["loss"]
    assert job.learner.version == 4


LEARN = {
    "dpok": ("train.steps=15", "train.lr=3e-4"),
    "grpo-guard": ("train.steps=8", "train.lr=1e-3", "clip_low=0.01", "clip_high=0.01"),
    "ac-flow": ("train.steps=20", "warmup=2", "actor_lr=1e-3"),
}


@pytest.mark.long
@pytest.mark.parametrize("method", LEARN)
def test_rewards_rise(method: str, tmp_path: Path) -> None:
    """mixture:right, whose reward is about 0 at the start."""
    overrides = {"out": str(tmp_path), "task": MIXTURE, "method": method}
    small = ["evaluate.every=0", "rollout.max_tokens=8", "checkpoint.every=0"]
    summary = train(load_config(None, [*small, *LEARN[method]], overrides))
    assert summary["reward_after"] > summary["reward_before"] + 0.15


def test_models_in_the_box() -> None:
    """Samples of the mixture lie on its ring, those of digits are digits to the classifier."""
    assert WEIGHTS.stat().st_size < 400_000
    for method in ("dpok", "ac-flow"):
        shares = []
        for task in (MIXTURE, "digits:class=0"):
            sets = ["evaluate.size=128", "rollout.max_tokens=20"]
            config = load_config(None, sets, {"task": task, "method": method})
            job = build_job(config)
            drawn = job._exam(job.model if method == "dpok" else job.velocity)
            x = drawn.samples if method == "dpok" else drawn
            if task == MIXTURE:
                near = torch.cdist(x, ring().float()).min(dim=1).values
                shares.append(float((near < 0.6).float().mean()))
            else:
                chance = torch.stack(
                    [make_sample_task(f"digits:class={k}").reward(x) for k in range(10)]
                )
                shares.append(float((chance.max(dim=0).values > 0.8).float().mean()))
                assert len(chance.argmax(dim=0).unique()) >= 8
        assert min(shares) > 0.75, shares


ENERGIES = """
import torch
def nan(x): return (x - 2).sum(1).log()
def wrong(x): return x
def fails(x): return x[:, 7]
def flat(x): return torch.zeros(len(x))
def fine(x): return (x ** 4).sum(1)
"""
REFUSED = {
    "task digits needs a reward: digits:class=0 to 9, digits:ink": ("digits", "dpok"),
    "unknown reward of task digits 'clas'; did you mean 'class'": ("digits:clas=7", "dpok"),
    "digits:class=12: expected a number from 0 to 9": ("digits:class=12", "dpok"),
    "digits:class=x: expected a number from 0 to 9": ("digits:class=x", "ac-flow"),
    "mixture:right takes no number": ("mixture:right=2", "dpok"),
    "unknown energy .*'gausian'; did you mean 'gaussian'": ("energy:gausian", "adjoint-sampling"),
    "task energy needs a name": ("energy", "adjoint-sampling"),
    "the energy is not finite for 3 of 3 points": ("energy:FILE:nan", "adjoint-sampling"),
    "expected a tensor of 3 energies .* got \\[3, 2\\]": ("energy:FILE:wrong", "adjoint-sampling"),
    "failed: IndexError": ("energy:FILE:fails", "adjoint-sampling"),
    "the energy has no gradient": ("energy:FILE:flat", "adjoint-sampling"),
    "has no function 'other'": ("energy:FILE:other", "adjoint-sampling"),
    "dpok is a method for generative models .* energy:two-modes is one for energies": (
        *(ENERGY, "dpok"),
    ),
    "adjoint-sampling is a method for energies .*one for generative models": (
        *(DIGITS, "adjoint-sampling"),
    ),
    "dpok is a method for generative models .*digits:class=7.* arithmetic is one for language": (
        *("arithmetic", "dpok"),
    ),
    "grpo is a method for language .* energy:two-modes is one for energies": (ENERGY, "grpo"),
    "avg is a method for control": (DIGITS, "avg"),
    "needs the batch field 'vocab_logp'.*Gaussian action, not a token": (
        *(DIGITS, "grpo-guard"),
        "policy=tokens",
    ),
    "needs the batch field 'entropy'": (DIGITS, "empg"),
    "gradient=isopo does not act on generative models": (DIGITS, "isopo"),
    "train.lr=.* has no effect: this method makes updates of its own": (
        *(DIGITS, "ac-flow"),
        "train.lr=0.1",
    ),
    "train.mini_batches=2 has no effect, since schedule=transition_buffer": (
        *(DIGITS, "dpok"),
        "mini_batches=2",
    ),
    "model.name=tiny has no effect: the task brings its network": (
        *(DIGITS, "dpok"),
        "model.name=tiny",
    ),
    "rollout.thoughts=2 has no effect": (DIGITS, "dpok", "rollout.thoughts=2"),
    "a chain has 1 to 500 denoising steps": (DIGITS, "dpok", "rollout.max_tokens=501"),
    "sigma_max=1 must be above sigma_min=2": (ENERGY, "adjoint-sampling", "sigma_min=2"),
    r"ac-flow: samples_per_step must be in \[2, inf\), got 0": (
        DIGITS,
        "ac-flow",
        "samples_per_step=0",
    ),
    "adjoint-sampling: control_lr must not be negative or infinite, got -1": (
        *(ENERGY, "adjoint-sampling"),
        "control_lr=-1",
    ),
    "'sigma_min'=0.5 has no effect with these settings; it has one with noise=geometric": (
        *(ENERGY, "adjoint-sampling"),
        *("noise=constant", "sigma_min=0.5"),
    ),
    "'tau'=3.0 has no effect with these settings; it has one with weighting=exp": (
        *(DIGITS, "ac-flow"),
        *("weighting=positive", "tau=3"),
    ),
    "device=cuda: generative models run on the CPU": (DIGITS, "dpok", "device=cuda"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_one_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "energies.py").write_text(ENERGIES)
    task, method, *sets = REFUSED[line]
    task = task.replace("FILE", str(tmp_path / "energies.py"))
    overrides = {"out": str(tmp_path / "run"), "task": task, "method": method}
    with pytest.raises(ProxpoError, match=line) as caught:
        build_job(load_config(None, sets, overrides=overrides))
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.schedulers.scheduling_ddim", None)
    with pytest.raises(ProxpoError, match=r"needs diffusers: pip install 'proxpo\[generative\]'"):
        build_job(config_of(tmp_path, DIGITS, "dpok"))


def test_the_command_line(tmp_path: Path, capsys) -> None:
    """A report with samples before and after; a user's energy."""
    out = tmp_path / "run"
    words = ["--set", "train.steps=1", "--set", "evaluate.size=40", "--set", "max_tokens=4"]
    task = ["--task", DIGITS, "--method", "dpok", "--out", str(out)]
    assert main(["train", *task, *words]) == 0
    assert "mean reward" in capsys.readouterr().out
    assert (out / "samples.png").stat().st_size > 1000
    assert 'alt="Samples before and after"' in (out / "report.html").read_text()
    (tmp_path / "energies.py").write_text(ENERGIES)
    task = ["--task", f"energy:{tmp_path}/energies.py:fine", "--out", str(tmp_path / "own")]
    assert main(["train", *task, *words, "--set", "batches=2"]) == 0
    assert "lower bound on log Z" in capsys.readouterr().out
