"""The parts of benchmarks that their figures depend on."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import kernels
import record


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
