"""The loop of own_loop.py under Accelerate: the prompts are shared out, the gradients are one.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py

(--multi_gpu makes several processes, with or without GPUs; with --cpu there would be only one.)
Each problem's responses stay together and a response depends on its own seed alone, so that any
number of processes that divides PARTS samples the same and takes the same steps.
"""

import torch
from accelerate import Accelerator
from own_loop import LR, METHOD, PROBLEMS, STEPS, UPDATES, backward, sample

import proxpo
from proxpo.models import load_policy
from proxpo.sampler import make_sampler
from proxpo.types import local

PARTS = 2  # micro-batches of a step; ISOPO takes its lengths inside each of them


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    ranks, all_sum = accelerator.num_processes, local
    if ranks > 1:
        all_sum = proxpo.over_ranks()
    if accelerator.mixed_precision == "fp16":
        raise SystemExit("fp16 scales the loss, which this loop does not; use bf16")
    if PARTS % ranks:
        raise SystemExit(f"{ranks} processes cannot share {PARTS} micro-batches evenly")
    accelerator.print(f"{ranks} processes")
    policy = load_policy("tiny", device=accelerator.device)
    # overlap="all": with sampled positions, ISOPO would draw other ones on other ranks.
    recipe = proxpo.make_recipe(METHOD, {"overlap": "all"} if METHOD == "isopo" else {})
    transform = recipe.gradient.apply() if recipe.gradient else None
    sampler, weights = make_sampler("local", policy), policy.model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    model, optimizer = accelerator.prepare(policy.model, optimizer)
    parts = torch.arange(len(PROBLEMS)).chunk(PARTS)[accelerator.process_index :: ranks]
    local_rows = torch.cat(parts).tolist()
    for step in range(STEPS):
        sampler.sync()
        seeds = [step * len(PROBLEMS) + row for row in local_rows]
        (ids, attended), batch = sample(
            policy, sampler, [PROBLEMS[row] for row in local_rows], seeds
        )
        # Advantages belong to whole groups, which are all here; the counts are those of all ranks.
        batch, ctx, _ = proxpo.prepare(recipe, batch, proxpo.Context(all_sum=all_sum))
        ctx = proxpo.Context(denominators=ctx.denominators)  # refuses statistics of a micro-batch
        for _ in range(UPDATES):
            for rows in torch.arange(len(local_rows)).chunk(len(parts)):
                cut = (ids[rows], attended[rows], batch.rows(rows))
                backward(model, recipe, transform, *cut, ctx)
            for weight in model.parameters():
                weight.grad *= ranks  # DDP took the mean; with shared counts the sum is meant
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            if transform:
                transform.step()
        reward = accelerator.reduce(batch.rewards.sum()) / len(PROBLEMS)
        accelerator.print(f"step {step + 1}: reward {reward:.3f}, gradient {norm:.6e}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
