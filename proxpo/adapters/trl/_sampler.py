"""TRL's order of prompts, also in a run that is resumed past its first epoch."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """TRL's sampler, started at an epoch.

    TRL draws the order of every epoch from one generator, which a resumed run begins anew: it would
    go on in a later epoch with the order of the first. Here the orders of earlier epochs are drawn
    again and thrown away, so that an epoch's order depends on nothing but its number.
    """

    def __init__(self, sampler: Any, epoch: Callable[[], int]) -> None:
        self._sampler, self._epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed)
            for _ in range(self._epoch()):
                next(iter(self._sampler))
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


__all__ = ["EpochSampler"]
