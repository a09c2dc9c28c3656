"""Two processes that talk over gloo, forked off one that has loaded what they need."""

import multiprocessing
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_LOADED = [
    "split",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
Body = Callable[[int, str], None]


def run(body: Body, folder: str) -> None:
    """body(rank, folder) in both, with a process group open."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_LOADED)
    mp.start_processes(_rank, args=(body, folder), nprocs=2, start_method="forkserver")


def _rank(rank: int, body: Body, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    body(rank, folder)
    dist.destroy_process_group()
