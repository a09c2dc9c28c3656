"""Partial credit for programs that fail."""

import pytest

from proxpo.stages.reward import progress_reward
from proxpo.stages.reward.progress import MILESTONES


def test_partial_credit() -> None:
    output = "Imports done\nData loaded.\nMODEL BUILT\nTraceback: out of memory"
    assert progress_reward("") == -10.0
    assert progress_reward(output) == pytest.approx(-9.7)
    assert progress_reward("data loaded\n" * 50) == pytest.approx(-9.9)
    assert progress_reward(output, score=0.25) == 0.25
    assert progress_reward("a b", milestones=["a", "b", "c"], per_hit=1.0, failure=0.0) == 2
    assert len(MILESTONES) == 7
