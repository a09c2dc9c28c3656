"""Tokens that good and bad responses share."""

import time

import torch

from proxpo.stages.weights.conflict import conflict_runs


def test_a_million_tokens_take_seconds() -> None:
    """256 x 4,096 in a few operations on whole tensors."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (256, 4096), generator=g)
    group = torch.arange(32).repeat_interleave(8)
    start = time.perf_counter()
    lead, trail = conflict_runs(
        tokens, torch.ones_like(tokens, dtype=torch.bool), group, torch.randn(256, generator=g)
    )
    assert time.perf_counter() - start < 20
    assert lead.max() > 0
    assert trail.max() > 0
