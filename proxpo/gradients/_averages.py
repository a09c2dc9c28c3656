"""Trailing averages of squared lengths, per parameter and quantity."""

import torch
import torch.distributed as dist

from proxpo.shapes import Float, Tensor

DECAY = 0.9


class Averages:
    """E <- mean the first time, then E <- 0.9 E + 0.1 mean, moved once per optimizer step.

    A mini-batch uses the E left by earlier mini-batches; what it collects becomes visible with
    `step`. Over ranks, sums and counts are added, so that every rank holds the same E.
    """

    def __init__(self) -> None:
        self.values: dict[str, Float[Tensor, ""]] = {}
        self._pending: dict[str, tuple[Tensor, float]] = {}

    def get(self, key: str) -> Float[Tensor, ""] | None:
        return self.values.get(key)

    def collect(self, key: str, squares: Float[Tensor, " any"]) -> None:
        total, count = squares.detach().sum(), float(squares.numel())
        if key in self._pending:
            before, seen = self._pending[key]
            total, count = before + total, seen + count
        self._pending[key] = (total, count)

    def step(self, keys: list[str]) -> None:
        """Move the averages. `keys` lists what any rank may have collected, in the same order."""
        totals = self._gathered(keys) if _ranks() > 1 else self._pending
        for key, (total, count) in totals.items():
            if not isinstance(count, float) or count:
                mean = total / count
                known = self.values.get(key)
                self.values[key] = mean if known is None else DECAY * known + (1 - DECAY) * mean
        self._pending = {}

    def _gathered(self, keys: list[str]) -> dict[str, tuple[Tensor, float]]:
        device = next((total.device for total, _ in self._pending.values()), torch.device("cpu"))
        zero = (torch.zeros((), dtype=torch.float64, device=device), 0.0)
        pairs = [self._pending.get(key, zero) for key in keys]
        sums = torch.stack([total.double() for total, _ in pairs])
        counts = torch.tensor([count for _, count in pairs], dtype=torch.float64, device=device)
        packed = torch.stack([sums, counts])
        dist.all_reduce(packed)
        seen = packed[1].tolist()
        kinds = {key: total.dtype for key, (total, _) in self._pending.items()}
        return {
            key: (packed[0, place].to(kinds.get(key, torch.float32)), seen[place])
            for place, key in enumerate(keys)
            if seen[place]
        }


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
