"""Trailing averages of squared lengths, per parameter and quantity."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from proxpo.gradients._engine.device import sum_by
from proxpo.ops.shapes import Float, Tensor

DECAY = 0.9


class Collected(NamedTuple):
    """Squared lengths that wait for the next step: of one key, or one sum for each of many."""

    keys: tuple[str, ...]
    squares: Float[Tensor, "*any"]
    counts: tuple[float, ...]  # sequences behind the squares of each key

    @property
    def shape(self) -> tuple[int, int]:
        """Number of keys, and of the squares of each."""
        return len(self.keys), self.squares.numel() // len(self.keys)


class Averages:
    """E <- mean the first time, then E <- 0.9 E + 0.1 mean, moved once per optimizer step.

    A mini-batch uses the E left by earlier mini-batches; what it collects becomes visible with
    `step`. Over ranks, sums and counts are added, so that every rank holds the same E. What is not
    finite never enters: E would not recover from it.

    E stays where it is in memory, which recorded kernels read; `moves` counts the exceptions.
    """

    def __init__(self) -> None:
        self.values: dict[str, Float[Tensor, ""]] = {}
        self.moves = 0
        # Kept as they come and added up in `step`, so that a backward pass launches nothing here.
        self._pending: list[Collected] = []

    def get(self, key: str) -> Float[Tensor, ""] | None:
        return self.values.get(key)

    def collect(self, parts: Sequence[Collected]) -> None:
        """Adds what a block has measured."""
        self._pending += parts

    def load(self, values: dict[str, Float[Tensor, ""]]) -> None:
        self.values, self._pending = dict(values), []
        self.moves += 1

    def to(self, device: torch.device) -> None:
        """Moves E to the device of the kernels that read it."""
        if any(value.device != device for value in self.values.values()):
            self.values = {key: value.to(device) for key, value in self.values.items()}
            self.moves += 1

    def pending(self) -> int:
        """Number of entries that wait for the next `step`."""
        return len(self._pending)

    def waiting(self, quantities: Sequence[str]) -> Float[Tensor, "quantity two"]:
        """Σ x² of what waits, and its number, over all parameters and sequences; for each quantity.

        To be added over ranks, of which some may have collected nothing.
        """
        names = list(dict.fromkeys(key for part in self._pending for key in part.keys))
        totals, counts = self._totals(names)
        places = [[i for i, n in enumerate(names) if _quantity(n) == x] for x in quantities]
        return torch.stack([torch.stack([totals[own].sum(), counts[own].sum()]) for own in places])

    def keep(self, entries: int) -> None:
        """Drops all that waits but the first `entries`, see `pending`."""
        del self._pending[entries:]

    def step(self, keys: list[str], *, skipped: bool = False) -> bool:
        """Moves the averages by what waits, or drops it; returns True where they moved.

        `keys` lists what any rank may have collected. It is dropped on every rank where one of
        them says `skipped`, or where a sum is not finite.
        """
        ranks = _ranks()
        own = dict.fromkeys(key for part in self._pending for key in part.keys)
        names = sorted({*keys, *own}) if ranks > 1 else list(own)
        if ranks == 1 and (skipped or not names):
            self._pending = []
            return not skipped
        totals, counts = self._totals(names)
        if ranks > 1:
            packed = torch.cat([totals, counts, totals.new_tensor([float(skipped)])])
            dist.all_reduce(packed)
            totals, counts = packed[:-1].view(2, -1)
            skipped = bool(packed[-1])
        self._pending = []
        if skipped or not bool(torch.isfinite(totals).all()):
            return False
        if not names:
            return True
        means = totals / counts
        # With no average yet, the mean stands for it: 0.9 E + 0.1 E = E.
        known = [self.values.get(name, mean).to(mean) for name, mean in zip(names, means.unbind())]
        moved = torch.lerp(torch.stack(known), means, 1 - DECAY).unbind()
        collected = counts.tolist() if ranks > 1 else [1.0] * len(names)
        self._put({n: x for n, x, count in zip(names, moved, collected) if count})
        return True

    def _put(self, moved: dict[str, Float[Tensor, ""]]) -> None:
        """Writes new values over the old ones, where these lie on the same device."""
        old = self.values
        there = [n for n, x in moved.items() if n in old and old[n].device == x.device]
        if there:
            torch._foreach_copy_([old[n] for n in there], [moved[n] for n in there])
        other = moved.keys() - there
        self.moves += any(name in old for name in other)
        old.update({name: moved[name] for name in other})

    def _totals(self, names: list[str]) -> tuple[Float[Tensor, " key"], Float[Tensor, " key"]]:
        """Sums and counts by key, in few operations however many keys there are."""
        place = {name: number for number, name in enumerate(names)}
        device = self._pending[0].squares.device if self._pending else _device()
        totals = torch.zeros(len(names), dtype=torch.float64, device=device)
        counts = [0.0] * len(names)
        alike: dict[tuple[int, int], list[Collected]] = {}
        for part in self._pending:
            alike.setdefault(part.shape, []).append(part)
            for key, count in zip(part.keys, part.counts):
                counts[place[key]] += count
        for shape, parts in alike.items():
            squares = torch.stack([part.squares.reshape(shape).to(device) for part in parts])
            owner = torch.tensor([place[key] for part in parts for key in part.keys], device=device)
            sums = squares.sum(dim=2, dtype=torch.float64).reshape(-1, 1)
            totals += sum_by(sums, owner, len(names))[:, 0]
        return totals, totals.new_tensor(counts)


def _quantity(key: str) -> str:
    """F of `layers.0.weight/F`."""
    return key.rpartition("/")[2]


def _device() -> torch.device:
    """Device of the process group, for a rank that has collected nothing."""
    return torch.device("cuda" if _ranks() > 1 and dist.get_backend() == "nccl" else "cpu")


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
