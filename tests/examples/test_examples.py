"""The examples are run as a reader would run them, and must do what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as lightning
import pytest
import torch
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LINE = re.compile(r"step (\d+): reward ([\d.]+)(?:, gradient (\S+))?")


def changed(folder: Path, **settings: str) -> Path:
    """A copy of the examples in which `NAME = value` of the loop reads otherwise."""
    for path in EXAMPLES.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    loop = folder / "own_loop.py"
    for name, value in settings.items():
        text, times = re.subn(
            rf"^{name} = [^#\n]*", f"{name} = {value}  ", loop.read_text(), flags=re.M
        )
        assert times == 1
        loop.write_text(text)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script here, where torch is loaded already; what it prints."""

    def script(path: Path) -> str:
        with monkeypatch.context() as here:
            here.syspath_prepend(path.parent)
            here.delitem(sys.modules, "own_loop", raising=False)
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    yield script
    sys.modules.pop("own_loop", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def launched(path: Path) -> str:
    """Output of a script under `accelerate launch` with two processes."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "--main_process_port", "0", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_own_loop_is_short_and_swapping_the_method_changes_one_line():
    lines = (EXAMPLES / "own_loop.py").read_text().splitlines()
    assert len(lines) < 60
    assert [line for line in lines if "isopo" in line] == [
        'METHOD = "isopo"  # or "ema-kpo", or any other of `proxpo methods`'
    ]


def test_own_loop_learns(tmp_path, run):
    folder = changed(tmp_path, METHOD='"ema-kpo"')  # as isopo does in its tutorial
    seen = [float(reward) for _, reward, _ in LINE.findall(run(folder / "own_loop.py"))]
    assert len(seen) == 8
    assert sum(seen[-3:]) / 3 > seen[0] + 0.2


@pytest.mark.long
def test_other_trainers_take_the_steps_of_the_own_loop(tmp_path, run):
    folder = changed(tmp_path, **{"STEPS, UPDATES, LR": "2, 2, 5e-4"})
    files = ("own_loop.py", "lightning_loop.py", "transformers_trainer.py")
    own, *hosted = (LINE.findall(run(folder / name)) for name in files)
    assert len(own) == 2
    assert hosted == [own, own]
    assert float(own[-1][1]) > float(own[0][1]) + 0.05


@pytest.mark.long
def test_a_lightning_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """It draws by the checkpoint's weights, of which the sampler had no copy yet."""
    two = {"PROBLEMS": "[problem for problem in TASK.train[:2] for _ in range(4)]"}
    folder = changed(tmp_path, **{"STEPS, UPDATES, LR": "2, 2, 5e-3"}, **two)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_loop", raising=False)
    example = runpy.run_path(str(folder / "lightning_loop.py"))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}

    def fit(steps: int, **given: str) -> lightning.Trainer:
        host = lightning.Trainer(max_steps=steps, default_root_dir=tmp_path, devices=1, **quiet)
        host.fit(example["Learner"](), DataLoader(range(2), batch_size=None), **given)
        return host

    whole, half = fit(4), fit(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert resumed.global_step == 4
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), half.model.parameters())
    for one, other, before in pairs:
        assert torch.equal(one, other)
        assert not torch.equal(other, before)
    sys.modules.pop("own_loop", None)


def test_a_step_in_parts_is_refused_by_the_example_of_trainer(tmp_path, monkeypatch):
    """Its counts and groups are those of one batch."""
    folder = changed(tmp_path)
    script = folder / "transformers_trainer.py"
    text = script.read_text()
    script.write_text(text.replace("max_steps=", "gradient_accumulation_steps=2, max_steps="))
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(SystemExit, match="a step is one batch with all of PROBLEMS here"):
        runpy.run_path(str(script), run_name="__main__")


def test_two_processes_take_the_steps_of_one(tmp_path, run):
    folder = changed(tmp_path, **{"STEPS, UPDATES, LR": "2, 2, 5e-4"})
    script = folder / "accelerate_loop.py"
    one, two = run(script), launched(script)
    assert one.startswith("1 processes")
    assert two.startswith("2 processes")
    alone, together = LINE.findall(one), LINE.findall(two)
    assert [step for step, _, _ in alone] == ["1", "2"]
    for a, b in zip(alone, together, strict=True):
        assert a[:2] == b[:2]  # the same samples, so the same weights
        assert float(a[2]) == pytest.approx(float(b[2]), rel=1e-4)
    assert alone[0][2] != alone[1][2]
