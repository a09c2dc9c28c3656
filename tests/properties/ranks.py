"""One of two processes that share a batch: its half of the prompts, sums over both."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import gradients, make_batch, with_leaves
from methods.cases import CASES, recipe

import proxpo
from proxpo import Batch
from proxpo.types import AllSum, Context, local

SEED = 11


def run_case(case: str, batch: Batch, all_sum: AllSum = local) -> dict:
    """Loss, gradients and next state, as plain lists."""
    made, leaves = recipe(case), with_leaves(batch)
    batch, ctx, seen = proxpo.prepare(made, leaves, Context(all_sum=all_sum))
    value, metrics = proxpo.policy_loss(made, batch, ctx)
    state = made.update_state(made.init_state(), batch, seen | metrics)
    state = made.step_state(state, batch, metrics, ctx)
    return {
        "loss": float(value.detach()),
        "gradients": {name: grad.tolist() for name, grad in gradients(value, leaves).items()},
        "state": {p: {k: v.tolist() for k, v in s.items()} for p, s in state.items()},
    }


def main(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    batch = make_batch(SEED, groups=4, spread=0.4)
    mine = batch.rows(slice(0, 3) if rank == 0 else slice(3, 12))  # one prompt and three
    found = {case: run_case(case, mine, proxpo.over_ranks()) for case in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
