"""Seconds to allot rollouts to many prompts, with the exact optimum and the released programme.

    python benchmarks/knapsack.py                  10,000 prompts of 8 rollouts, up to 128 each
    python benchmarks/knapsack.py --prompts 50000

The dynamic programme is timed on 256 prompts, the size it was published for.
"""

import argparse
import statistics
import time

import torch

from proxpo.stages.budget import allocate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--high", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, prompts, official in (("exact", args.prompts, False), ("official", 256, True)):
        seconds = [timed(prompts, args.samples, args.high, official) for _ in range(args.rounds)]
        print(f"{name:8s} {prompts:6d} prompts: {statistics.median(seconds) * 1e3:8.1f} ms")


def timed(prompts: int, samples: int, high: int, official: bool) -> float:
    """Seconds of one allocation over prompts whose pass rates are multiples of 1/16."""
    generator = torch.Generator().manual_seed(0)
    rate = torch.randint(0, 17, (prompts,), generator=generator).double() / 16
    default = torch.full((prompts,), samples)
    known = torch.ones(prompts, dtype=torch.bool)
    start = time.perf_counter()
    found = allocate(
        rate, known, default, low=2, high=high, positive=2, negative=2, official=official
    )
    seconds = time.perf_counter() - start
    assert int(found.sum()) == prompts * samples
    return seconds


if __name__ == "__main__":
    main()
