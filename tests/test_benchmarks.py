"""The parts of benchmarks that their figures depend on."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gpu_step
import kernels
import record
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
