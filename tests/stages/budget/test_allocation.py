"""Rollouts shared out over prompts."""

import math

import torch

from proxpo.stages.budget import allocate

LIMITS = {"low": 2, "high": 128, "positive": 2, "negative": 2}


def worth(counts: list[int], rates: list[float]) -> float:
    return sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2 for n, p in zip(counts, rates))


def test_ten_thousand_prompts_share_what_there_is() -> None:
    g = torch.Generator().manual_seed(0)
    rate = torch.randint(0, 17, (10_000,), generator=g).double() / 16
    known, default = torch.ones(10_000, dtype=torch.bool), torch.full((10_000,), 8)
    found = allocate(rate, known, default, **LIMITS)
    assert int(found.sum()) == 80_000
    assert math.isfinite(worth(found.tolist(), rate.tolist()))
