"""One ratio per turn."""

import torch
from helpers import close, make_batch
from torch import Tensor

from proxpo import Batch
from proxpo.stages.ratio import turn
from proxpo.types import Context


def turn_ratio(batch: Batch, split: str = "turn") -> Tensor:
    return torch.where(batch.mask, turn(split=split).apply(batch, Context())[0], 0.0)


def test_only_the_names_of_turns_matter() -> None:
    batch = make_batch(1, spread=0.4)
    renamed = batch.replace(turn=7 - 3 * batch.turn)
    close(turn_ratio(renamed), turn_ratio(batch))
    spoilt = batch.replace(turn=torch.where(batch.mask, batch.turn, -(10**9)))
    close(turn_ratio(spoilt), turn_ratio(batch))
