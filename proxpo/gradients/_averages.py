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
        # Kept as they come and added up in `step`, so that a backward pass launches nothing here.
        self._pending: dict[str, list[tuple[Tensor, int]]] = {}

    def get(self, key: str) -> Float[Tensor, ""] | None:
        return self.values.get(key)

    def collect(self, key: str, squares: Float[Tensor, "*any"], count: int | None = None) -> None:
        """Note x² of some sequences, or their sum over `count` of them."""
        count = squares.numel() if count is None else count
        self._pending.setdefault(key, []).append((squares.detach(), count))

    def load(self, values: dict[str, Float[Tensor, ""]]) -> None:
        self.values, self._pending = dict(values), {}

    def step(self, keys: list[str]) -> None:
        """Move the averages. `keys` lists what any rank may have collected."""
        for key, (total, count) in self._totals(keys).items():
            mean, known = total / count, self.values.get(key)
            if known is not None:
                mean = DECAY * known.to(mean) + (1 - DECAY) * mean
            self.values[key] = mean
        self._pending = {}

    def _totals(self, keys: list[str]) -> dict[str, tuple[Tensor, float]]:
        totals = {
            key: (torch.stack([part.sum() for part, _ in parts]).sum(), sum(n for _, n in parts))
            for key, parts in self._pending.items()
        }
        return _over_ranks(totals, sorted({*keys, *totals})) if _ranks() > 1 else totals


def _over_ranks(
    totals: dict[str, tuple[Tensor, float]], keys: list[str]
) -> dict[str, tuple[Tensor, float]]:
    """Sums and counts added over ranks, all in one message."""
    device = next((total.device for total, _ in totals.values()), None) or _device()
    packed = torch.zeros(2, len(keys), dtype=torch.float64, device=device)
    for place, key in enumerate(keys):
        if key in totals:
            packed[0, place], packed[1, place] = totals[key]
    dist.all_reduce(packed)
    counts = packed[1].tolist()
    kinds = {key: total.dtype for key, (total, _) in totals.items()}
    return {
        key: (packed[0, place].to(kinds.get(key, torch.float32)), counts[place])
        for place, key in enumerate(keys)
        if counts[place]
    }


def _device() -> torch.device:
    """Where the process group talks, for a rank that has collected nothing."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
