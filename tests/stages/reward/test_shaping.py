"""Terms added to the reward."""

import torch
from helpers import close, f64, make_batch

from proxpo.stages.reward import overlong_penalty
from proxpo.types import Context


def penalties(lengths: list[int], **options: object) -> torch.Tensor:
    batch = make_batch(1, groups=1, size=len(lengths), tokens=40, holes=False)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    batch = batch.replace(mask=mask, rewards=torch.zeros(len(lengths)).double())
    return overlong_penalty(**options).apply(batch, Context())[0].rewards


def test_no_soft_zone() -> None:
    close(penalties([19, 20, 21], max_tokens=20, cache=0), f64([0.0, 0.0, -1.0]))
