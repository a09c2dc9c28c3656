"""The parts of benchmarks that their figures depend on."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from proxpo.models import TINY
from proxpo.train.build import build_job
from proxpo.train.config import load_config
from proxpo.train.observer import SILENT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import control_ppo
import engines_trl
import engines_verl
import gpu_step
import kernels
import record
import trl_vllm
import update_peak


def test_a_record_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    first = record.Record(path)
    first.add("arm", {"ms": 1.0})
    assert "arm" in record.Record(path)
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"machine": {"device": "another"}}))
    with pytest.raises(SystemExit, match="another machine"):
        record.Record(path)


def test_both_arms_of_ppo_are_scored_on_the_same_episodes(tmp_path: Path, monkeypatch) -> None:
    """Starts of Pendulum differ by more than seeds of training do."""
    monkeypatch.setattr(control_ppo, "EPISODES", 3)
    overrides = {"out": str(tmp_path), "task": "gym:Pendulum-v1", "method": "ppo"}
    job = build_job(load_config(None, ["evaluate.size=3", "dtype=float64"], overrides=overrides))

    def act(seen):
        return job.actor.draw(torch.as_tensor(seen).double()[None], None)[0].numpy()

    ours = job.examine(SILENT)[0]["eval/reward"]
    assert control_ppo.mean_return("Pendulum-v1", act) == pytest.approx(ours, rel=1e-5)
    job.close()


def test_kernels_that_overlap_count_once_in_the_gaps() -> None:
    profile = kernels.summary([("gemm", 0, 10), ("gemm", 5, 12), ("vectorized", 20, 30)])
    assert profile["ms"] == pytest.approx(0.030)
    assert profile["gaps_ms"] == pytest.approx(0.008)
    assert profile["kinds_ms"] == pytest.approx({"matrix products": 0.017, "elementwise": 0.010})


def test_an_update_of_a_shape_runs() -> None:
    args = argparse.Namespace(shape="toy", rows=4, length=12, prompt=4, samples=2)
    with gpu_step.whole_sequences():
        metrics = update_peak.work_of("reinforce", args, "cpu")()
    assert metrics == pytest.approx(update_peak.work_of("reinforce", args, "cpu")(), rel=1e-5)


def test_methods_take_turns_with_trl_and_are_not_repeated(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    path = tmp_path / "trl.json"
    command = ["--toy", "--steps", "2", "--warm-up", "1", "--json", str(path)]
    command += ["--arms", "trl", "isopo", "--variants", "lora"]
    engines_trl.main(command)
    words = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if " step " in line]
    assert words == [[arm, "step", n] for n in "12" for arm in ("trl", "isopo")]
    monkeypatch.delattr(engines_trl, "run")
    engines_trl.main(command)
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) == 2
    for name, entry in entries.items():
        assert [row["step"] for row in entry["steps"]] == [1, 2]
        assert all(0 <= row["reward"] <= 1 for row in entry["steps"])
        assert entry["relative"] == 1 or name.startswith("arithmetic/isopo/")
        assert not entry["corrected"]  # no vLLM, no gap


def test_the_example_of_trl_and_vllm_runs_on_a_cpu(tmp_path: Path, capsys) -> None:
    toy = [
        "--no-vllm",
        "--model",
        "tiny",
        "--task",
        "arithmetic",
        "--prompts",
        "2",
        "--tokens",
        "5",
    ]
    path = tmp_path / "run.json"
    trl_vllm.main(
        [*toy, "--recipe", "kpo", "--steps", "1", "--gradient-checkpointing", "--json", str(path)]
    )
    saved = json.loads(path.read_text())
    assert saved["options"]["recipe"] == "kpo"
    assert capsys.readouterr().out.startswith(f"step   1  reward {saved['steps'][0]['reward']:.3f}")


LOGGED = """#!{python}
import json, os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for n in (1, 2, 3):
        data = {{"critic/score/mean": n / 10, "timing_s/step": n, "actor/lr": 1}}
        file.write(json.dumps({{"step": n, "data": data}}) + "\\n")
assert os.path.exists(os.environ["DATA"] + "/train.parquet")
"""
SCRIPTS = {
    "vanilla": LOGGED.format(python=sys.executable),
    "p3o": "#!/bin/sh\necho begin; echo 'RuntimeError: no GPU'; echo end; exit 3\n",
    "kpo": "#!/bin/sh\nexec sleep 60\n",
}


def test_verl_s_metrics_and_errors_are_collected(tmp_path: Path) -> None:
    for name, text in SCRIPTS.items():
        script = tmp_path / f"{name}.sh"
        script.write_text(text)
        script.chmod(0o755)
    path = tmp_path / "verl.json"
    command = ["--scripts", str(tmp_path), "--model", str(TINY), "--json", str(path)]
    engines_verl.main([*command, "--arms", "vanilla", "p3o", "kpo", "--limit", "2"])
    entries = json.loads(path.read_text())["entries"]
    own, failed, late = (entries[f"arithmetic-chat/{arm}"] for arm in ("vanilla", "p3o", "kpo"))
    assert own["steps"][2] == {"step": 3, "reward": 0.3, "seconds": 3.0}
    assert (own["status"], own["median_s"], own["relative"]) == (0, 3.0, 1.0)
    assert failed["status"] == 3
    assert failed["error"] == [
        "RuntimeError: no GPU",
        "...",
        "begin",
        "RuntimeError: no GPU",
        "end",
    ]
    assert late["status"] == "ended after 2 s"
