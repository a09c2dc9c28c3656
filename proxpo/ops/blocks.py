"""Slices by which wide arrays are worked through."""

from collections.abc import Iterator

import torch

# Entries of a block: on a CPU it stays in the cache and its memory is used again, on a GPU few
# kernels are launched.
CPU_ENTRIES, GPU_ENTRIES = 1 << 20, 1 << 26


def blocks(size: int, step: int) -> Iterator[slice]:
    """Slices that cover range(size), none longer than `step`; one empty slice where size is 0."""
    return (slice(at, min(at + step, size)) for at in range(0, max(size, 1), step))


def row_blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose arrays of this width are cheap to make on the device."""
    entries = CPU_ENTRIES if device.type == "cpu" else GPU_ENTRIES
    return blocks(rows, max(1, entries // max(width, 1)))


__all__ = ["blocks", "row_blocks"]
