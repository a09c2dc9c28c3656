"""Rewards that grow with the novelty of a gradient's direction."""

import math

import pytest
import torch
from helpers import close, f64, make_batch

from proxpo import Batch
from proxpo.stages.reward import gradient_novelty
from proxpo.types import Context

RIGHT_AND_WRONG = f64([1, -1, 1, -1, 1, -1, -1, 1, 1])


def shaped(batch: Batch, **options: object) -> torch.Tensor:
    return gradient_novelty(**options).apply(batch, Context())[0].rewards


@pytest.fixture
def batch() -> Batch:
    return make_batch(1).replace(rewards=RIGHT_AND_WRONG)


def test_small_groups_keep_their_rewards() -> None:
    for size in (1, 2):
        batch = make_batch(1, groups=3, size=size)
        for reading in ("printed", "described", "signed"):
            close(shaped(batch, reading=reading), batch.rewards, atol=0.0)


def test_unscored_responses_are_nobodys_other(batch: Batch) -> None:
    rewards = batch.rewards.clone()
    rewards[0] = math.nan
    found = shaped(batch.replace(rewards=rewards))
    assert found[0].isnan()
    close(found[1:3], rewards[1:3])  # two are left, whose novelties agree
