"""The parts of benchmarks that their figures depend on."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

import proxpo
from proxpo.models import load_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import gpu_step
import kernels
import rank_traffic
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


def test_a_ring_of_equal_links_takes_its_rounds() -> None:
    """2 (N - 1) (latency + S / (N bandwidth)); one slow link sets the pace of all."""
    quiet = rank_traffic.Network(noise=0.0)
    inside = rank_traffic.ring_seconds(8e9, 8, quiet, None)
    assert inside == pytest.approx(14 * (quiet.inside_latency + 1e9 / quiet.inside_bandwidth))
    between = rank_traffic.ring_seconds(16e9, 16, quiet, None)
    round_ = quiet.between_latency + 1e9 / quiet.between_bandwidth
    assert between == pytest.approx(30 * round_, rel=1e-6)


def test_isopo_averages_one_number_for_each_weight() -> None:
    """The K of rank_traffic.py, counted after a step."""
    policy = load_policy("tiny")
    transform = proxpo.make_recipe("isopo").gradient.apply()
    ids = torch.arange(12).view(2, 6)
    rows = torch.arange(2)[:, None].expand(2, 6)
    with transform.applied(policy.model, sequences=rows, advantages=torch.ones(2)):
        policy.model(ids).logits.log_softmax(-1)[..., 0].sum().backward()
    transform.step()
    uses = policy.model.named_parameters(remove_duplicate=False)  # the tied head is one more
    assert len(transform.averages.values) == len(list(uses))
