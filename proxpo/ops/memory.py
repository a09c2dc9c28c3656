"""Memory: how much of a GPU's is left, and whether it was what an error lacked."""

import contextlib
import errno
import re
import sys
from pathlib import Path

import torch

_NO_MEMORY = re.compile(
    r"out of memory|not enough memory|can(?:'t|not) allocate memory|alloc_failed|bad_alloc", re.I
)
_CUDNN = re.compile(r"cudnn|mha_graph", re.I)
_WORKSPACE = 256 << 20


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still take, within its share of the whole.

    Of a CPU's memory nothing is known: more than anything needs.
    """
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, share - reserved) + reserved - torch.cuda.memory_allocated(device)


def host_memory() -> int:
    """Bytes of the machine's memory that are free, within a container's limit."""
    free, group = sys.maxsize, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        free = 1024 * int(known[1])
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """True for a lack of memory of GPU or CPU, whose allocator has only a message for it.

    cuDNN does not name its cause: on a GPU that is full, its errors are taken for a lack of memory.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    return bool(_NO_MEMORY.search(str(error)) or (_CUDNN.search(str(error)) and _is_full()))


def _is_full() -> bool:
    """True where the current GPU has less left than a workspace of cuDNN takes."""
    return torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] < _WORKSPACE


__all__ = ["free_memory", "host_memory", "is_out_of_memory"]
