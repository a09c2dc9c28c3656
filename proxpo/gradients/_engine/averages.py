"""Trailing averages of squared lengths, per parameter and quantity."""

import torch
import torch.distributed as dist

from proxpo.ops.shapes import Float, Tensor

DECAY = 0.9


class Averages:
    """E <- mean the first time, then E <- 0.9 E + 0.1 mean, moved once per optimizer step.

    A mini-batch uses the E left by earlier mini-batches; what it collects becomes visible with
    `step`. Over ranks, sums and counts are added, so that every rank holds the same E. What is not
    finite never enters: E would not recover from it.
    """

    def __init__(self) -> None:
        self.values: dict[str, Float[Tensor, ""]] = {}
        # Kept as they come and added up in `step`, so that a backward pass launches nothing here.
        self._pending: dict[str, list[tuple[Tensor, int]]] = {}

    def get(self, key: str) -> Float[Tensor, ""] | None:
        return self.values.get(key)

    def collect(self, key: str, squares: Float[Tensor, "*any"], count: int | None = None) -> None:
        """Adds x² of some sequences, or their sum over `count` of them."""
        count = squares.numel() if count is None else count
        self._pending.setdefault(key, []).append((squares.detach(), count))

    def load(self, values: dict[str, Float[Tensor, ""]]) -> None:
        self.values, self._pending = dict(values), {}

    def pending(self) -> dict[str, int]:
        """Number of entries of each key that wait for the next `step`."""
        return {key: len(parts) for key, parts in self._pending.items()}

    def keep(self, entries: dict[str, int]) -> None:
        """Drops all that waits but the first `entries` of each key, see `pending`."""
        self._pending = {key: self._pending[key][:count] for key, count in entries.items()}

    def step(self, keys: list[str], *, skipped: bool = False) -> bool:
        """Moves the averages by what waits, or drops it; returns True where they moved.

        `keys` lists what any rank may have collected. It is dropped on every rank where one of
        them says `skipped`, or where a sum is not finite.
        """
        ranks = _ranks()
        names = sorted({*keys, *self._pending}) if ranks > 1 else list(self._pending)
        if ranks == 1 and (skipped or not names):
            self._pending = {}
            return not skipped
        totals, counts = self._totals(names)
        if ranks > 1:
            packed = torch.cat([totals, counts, totals.new_tensor([float(skipped)])])
            dist.all_reduce(packed)
            totals, counts = packed[:-1].view(2, -1)
            skipped = bool(packed[-1])
        self._pending = {}
        if skipped or not bool(torch.isfinite(totals).all()):
            return False
        if not names:
            return True
        means = totals / counts
        # With no average yet, the mean stands for it: 0.9 E + 0.1 E = E.
        known = [self.values.get(name, mean).to(mean) for name, mean in zip(names, means.unbind())]
        moved = torch.lerp(torch.stack(known), means, 1 - DECAY).unbind()
        collected = counts.tolist() if ranks > 1 else [1.0] * len(names)
        self.values.update({n: x for n, x, count in zip(names, moved, collected) if count})
        return True

    def _totals(self, names: list[str]) -> tuple[Float[Tensor, " key"], Float[Tensor, " key"]]:
        """Sums and counts by key, in few operations however many keys there are."""
        parts = [(place, *part) for place, key in enumerate(names) for part in self._of(key)]
        device = parts[0][1].device if parts else _device()
        totals = torch.zeros(len(names), dtype=torch.float64, device=device)
        counts = torch.zeros(len(names), dtype=torch.float64)
        if not parts:
            return totals, counts.to(device)
        owner = torch.tensor([p for p, x, _ in parts for _ in range(x.numel())], device=device)
        flat = torch.cat([squares.reshape(-1).to(device) for _, squares, _ in parts])
        for place, _, count in parts:
            counts[place] += count
        return totals.index_add_(0, owner, flat.double()), counts.to(device)

    def _of(self, key: str) -> list[tuple[Tensor, int]]:
        return self._pending.get(key, [])


def _device() -> torch.device:
    """Device of the process group, for a rank that has collected nothing."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
