"""Tokens and responses that are masked."""

import math

import pytest
import torch
from helpers import f64, mismatch

import proxpo
from proxpo.ops.metering import combined
from proxpo.stages.filter import reject

CONTEXT = proxpo.Context()
STRICT = {"name": "reject", "estimator": "k2", "statistic": "token", "threshold": 0.1}
LOOSE = {"name": "reject", "estimator": "k2", "statistic": "token", "threshold": 10.0}


def kept_tokens(q: list[list[float]], **options: object) -> list[list[bool]]:
    batch = mismatch(q)
    keep = reject(**options).apply(batch, CONTEXT)[0]
    return (keep & batch.mask).tolist()


def test_sign_of_k1() -> None:
    """k1 is -q: "0.9_1.2" keeps trainer/sampler in [1/1.2, 1/0.9], not in [0.9, 1.2]."""
    inside, outside = -math.log(1.15), math.log(1.15)
    options = {"estimator": "k1", "statistic": "token", "threshold": "0.9_1.2"}
    assert kept_tokens([[inside, outside]], **options) == [[True, False]]
    flipped = [0.9 <= math.exp(q) <= 1.2 for q in (inside, outside)]  # the wrong sign
    assert flipped == [False, True]


def test_two_filters_of_one_kind_both_show_their_share() -> None:
    """Two of three tokens leave by the first criterion, none by the second."""
    made = proxpo.make_recipe("grpo", {"filter": [STRICT, LOOSE]})
    batch = mismatch([[0.0, 0.5, 0.9]], rewards=f64([1.0]), group=torch.zeros(1).long())
    metrics = proxpo.prepare(made, batch).metrics
    assert float(metrics["filter/rejected"]) == pytest.approx(2 / 3)
    assert float(metrics["filter/rejected.2"]) == 0.0


def test_metrics_of_one_name_are_combined_each_by_itself() -> None:
    """A mean, and a largest value, over two micro-batches of one and three tokens."""
    made = proxpo.make_recipe("grpo")
    parts = [(0.25, (8.0, 1.0, 5.0)), (0.75, (0.0, 3.0, 2.0))]
    names = ("weights/mean.2", "kl/old_max.2", "memory/regularisers.kl_dual/kl/old_max")
    totals: dict[str, torch.Tensor] = {}
    for share, numbers in parts:
        totals = combined(made, totals, dict(zip(names, map(torch.tensor, numbers))), share=share)
    assert [float(totals[name]) for name in names] == [2.0, 3.0, 5.0]


def test_one_bound_is_two_sided() -> None:
    options = {"statistic": "token", "threshold": 2.0}
    assert kept_tokens([[0.6, -0.6, 0.7, -0.7]], **options) == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("estimator", "value"), [("k2", lambda u: u * u / 2), ("k3", lambda u: math.expm1(u) - u)]
)
@pytest.mark.parametrize("statistic", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_statistics(estimator: str, value: object, statistic: str) -> None:
    q = [[0.3, -0.2], [0.1, 0.05]]
    rows = [[value(u) for u in row] for row in q]
    pooled = {
        "token": rows,
        "seq_sum": [[sum(row)] * 2 for row in rows],
        "seq_mean": [[sum(row) / 2] * 2 for row in rows],
        "seq_max": [[max(row)] * 2 for row in rows],
    }[statistic]
    limit = 0.03
    options = {"estimator": estimator, "statistic": statistic, "threshold": limit}
    assert kept_tokens(q, **options) == [[x <= limit for x in row] for row in pooled]
