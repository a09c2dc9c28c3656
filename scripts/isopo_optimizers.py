"""Does ISOPO keep its advantages under optimizers other than AdamW? A small, exact answer.

    python scripts/isopo_optimizers.py --out docs/isopo/optimizers.csv

Task: add two digits; reward 1 for both digits of the sum. A small transformer starts from a short
supervised phase and is trained with group-relative advantages by REINFORCE and by ISOPO under each
optimizer that divides a gradient by its size. All 100 prompts and all 100 answers are evaluated
exactly: success is the mean probability of the right answer, KL the drift KL(π ‖ π_start) per
answer. The learning rate of every pair is the one of three with the best final success, on a seed
that is not reported.
"""

import argparse
import copy
import csv
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from toy_policy import ToyPolicy, response_logp, sample

from proxpo import gradients
from proxpo.exact.policy import token_kl
from proxpo.optimizers import make_optimizer

PROMPT, ANSWER, TUNING_SEED = 2, 2, 100
PAIRS = torch.cartesian_prod(torch.arange(10), torch.arange(10))
METHODS: dict[str, Callable[[], gradients.Transform]] = {
    "reinforce": lambda: gradients.isopo(preset="reinforce"),
    "isopo": lambda: gradients.isopo(preset="fisher", overlap="all"),
    "isopo reg=1": lambda: gradients.isopo(preset="fisher", reg=1.0, overlap="all"),
    "isopo-ntk": lambda: gradients.isopo_ntk(),
}
RATES = {
    "adamw": (5e-4, 1.5e-3, 4e-3),
    "muon": (1.5e-3, 4e-3, 1e-2),
    "soap": (1e-3, 3e-3, 8e-3),
    "shampoo": (2e-3, 6e-3, 2e-2),
    "kfac": (2e-3, 5e-3, 1.5e-2),
}
FIELDS = ("method", "optimizer", "lr", "start", "success", "success_sd", "kl", "kl_sd")


def solve(prompts: Tensor) -> Tensor:
    """The two digits of the sum."""
    total = prompts.sum(1)
    return torch.stack([total // 10, total % 10], dim=1)


@cache
def warm_start(seed: int, steps: int = 60) -> ToyPolicy:
    """A policy that has seen some right answers."""
    torch.manual_seed(seed)
    model = ToyPolicy(10, width=32, layers=1, longest=PROMPT + ANSWER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = torch.randint(10, (64, PROMPT))
        ids = torch.cat([prompts, solve(prompts)], dim=1)
        optimizer.zero_grad()
        (-response_logp(model, ids, PROMPT).mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, start: nn.Module) -> tuple[float, float]:
    """Mean probability of the right answer, and KL(π ‖ π_start) per answer; both exact."""
    right = torch.cat([PAIRS, solve(PAIRS)], dim=1)
    success = response_logp(model, right, PROMPT).sum(1).exp().mean()
    first = torch.cat([PAIRS.repeat_interleave(10, 0), torch.arange(10).repeat(100)[:, None]], 1)
    now, then = (m(first)[:, PROMPT - 1 :].log_softmax(-1) for m in (model, start))
    weight = now[:, 0].exp().gather(1, first[:, PROMPT:])[:, 0] / len(PAIRS)
    kl = token_kl(now, then)
    return float(success), float(kl[::10, 0].mean() + (weight * kl[:, 1]).sum())


def train(method: str, optimizer_name: str, lr: float, seed: int, steps: int) -> list[tuple]:
    """(step, success, KL) at the start and at the end."""
    start = warm_start(seed)
    model = copy.deepcopy(start)
    transform, optimizer = (
        METHODS[method](),
        make_optimizer(optimizer_name, model, lr, weight_decay=0.0),
    )
    draw = torch.Generator().manual_seed(seed)
    trace = [(0, *evaluate(model, start))]
    for _ in range(steps):
        prompts = torch.randint(10, (16, PROMPT), generator=draw).repeat_interleave(8, 0)
        ids = sample(model, prompts, ANSWER, draw)
        rewards = (ids[:, PROMPT:] == solve(prompts)).all(1).float().view(16, 8)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        index = torch.arange(len(ids))[:, None].expand(-1, ids.shape[1] - 1)
        optimizer.zero_grad()
        with transform.applied(model, sequences=index, advantages=advantages):
            (-response_logp(model, ids, PROMPT).sum()).backward()
        for p in model.parameters():
            p.grad /= len(ids)  # a mean over sequences, for the optimizers that see the scale
        optimizer.step()
        transform.step()
    return [*trace, (steps, *evaluate(model, start))]


def summary(method: str, optimizer: str, lr: float, traces: list[list[tuple]]) -> dict:
    success, kl = ([trace[-1][i] for trace in traces] for i in (1, 2))
    return {
        "method": method,
        "optimizer": optimizer,
        "lr": lr,
        "start": round(statistics.mean(trace[0][1] for trace in traces), 3),
        "success": round(statistics.mean(success), 3),
        "success_sd": round(statistics.stdev(success), 3),
        "kl": round(statistics.mean(kl), 2),
        "kl_sd": round(statistics.stdev(kl), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/isopo/optimizers.csv"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--optimizers", nargs="+", default=list(RATES), choices=RATES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    rows = []
    for optimizer in options.optimizers:
        for method in options.methods:
            tried = {
                lr: train(method, optimizer, lr, TUNING_SEED, options.steps)[-1][1]
                for lr in RATES[optimizer]
            }
            lr = max(tried, key=tried.__getitem__)
            seeds = range(options.seeds)
            traces = [train(method, optimizer, lr, seed, options.steps) for seed in seeds]
            rows.append(summary(method, optimizer, lr, traces))
            print(*(f"{k}={v}" for k, v in rows[-1].items()), tried, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
