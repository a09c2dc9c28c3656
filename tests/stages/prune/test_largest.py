"""Responses kept by the size of their advantage."""

import pytest
import torch

from proxpo.stages.prune.largest import keep_best


@pytest.mark.parametrize(
    ("size", "rate", "most"),
    [(6, 2 / 3, 2), (16, 0.9375, 1), (10, 0.9, 1), (3, 0.5, 1), (2, 0.6, 0)],
)
def test_counts_survive_rounding(size: int, rate: float, most: int) -> None:
    present, group = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    assert keep_best(torch.rand(size), present, group, rate=rate).sum() == most


def test_ties_go_to_the_earlier_row_and_empty_rows_do_not_count() -> None:
    group = torch.tensor([5, 2, 5, 2, 5, 2])
    present = torch.tensor([True, True, True, True, False, True])
    found = keep_best(torch.ones(6), present, group, rate=0.5)
    assert found.tolist() == [True, True, False, False, False, False]
