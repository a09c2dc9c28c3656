"""Memory of a GPU."""

import torch


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still take, within its share of the whole."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, share - reserved) + reserved - torch.cuda.memory_allocated(device)


__all__ = ["free_memory"]
