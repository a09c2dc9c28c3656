"""Tokens that good and bad responses share."""

import torch

from proxpo.stages.weights.conflict import conflict_runs


def test_a_million_tokens() -> None:
    """256 x 4,096 of three words: every response shares its beginning and its end with another."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (256, 4096), generator=g)
    group = torch.arange(32).repeat_interleave(8)
    lead, trail = conflict_runs(
        tokens, torch.ones_like(tokens, dtype=torch.bool), group, torch.randn(256, generator=g)
    )
    assert lead.max() > 0
    assert trail.max() > 0
