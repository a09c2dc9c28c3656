"""The simulated traffic of many ranks: its ring, and its count of what ISOPO sends."""

import sys
from pathlib import Path

import pytest
import torch

import proxpo
from proxpo.models import load_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import rank_traffic


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
