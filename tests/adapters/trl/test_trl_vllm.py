"""TRL with real vLLM, in vLLM's own environment."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_vllm_samples_with_the_weights_of_each_step():
    python = os.environ.get("PROXPO_VLLM_PYTHON")
    if not python:
        pytest.fail(
            "set PROXPO_VLLM_PYTHON to the interpreter of an environment made with"
            " requirements/vllm.txt"
        )
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
    done = subprocess.run(
        [python, str(HERE / "trl_vllm_probe.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["losses"]) == len(found["gaps"]) == 5
    assert all(map(math.isfinite, found["losses"]))
    assert max(found["gaps"]) < 1e-4  # of log-probabilities, to those of the weights of the step
    assert found["stale"][0] < 1e-4
    assert min(found["stale"][1:]) > 0.1  # and not to those of the start
    assert found["weights"] == pytest.approx([1.0] * 5, abs=1e-4)  # the sampler's share, by TIS
