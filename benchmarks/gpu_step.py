"""A training step as a user runs it: rollout, update, peak memory, with CUDA graphs and without.

    python benchmarks/gpu_step.py                                    SmolLM2 on a GPU
    python benchmarks/gpu_step.py --preset quickstart --graphs off   the model in the box, CPU
    python benchmarks/gpu_step.py --methods reinforce isopo --micro 64 512 --json step.json

Every arm trains `--steps` steps in each of `--rounds` rounds; the arms take turns. The first three
steps of a run, in which shapes come for the first time and graphs are recorded, do not count. The
median of the others does, beside the first arm's.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

import torch

from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.observer import Observer

TIMES = ("step_time", "proxpo/time/rollout", "proxpo/time/update")
WARM_UP = 3


def run(preset: str, sets: list[str], steps: int) -> tuple[list[dict[str, float]], float]:
    """Times of the counted steps, and the peak of the GPU's memory in GiB."""
    rows: list[dict[str, float]] = []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        common = ["evaluate.every=0", "evaluate.size=8", f"steps={steps}", f"out={folder}/run"]
        observer = Observer(on_step=lambda step, metrics: rows.append(metrics))
        train(load_config(preset, [*sets, *common]), observer=observer)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return [{name: float(row[name]) for name in TIMES} for row in rows[WARM_UP:]], peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="smollm2-arithmetic")
    parser.add_argument("--methods", nargs="+", default=["reinforce", "isopo", "isopo-ntk"])
    parser.add_argument("--micro", nargs="+", default=["64", "512"])
    parser.add_argument("--graphs", nargs="+", default=["off", "auto"])
    parser.add_argument("--set", nargs="*", default=[], dest="sets")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arms = {
        f"{method} micro_batch={micro} graphs={graphs}": [
            f"method={method}", f"train.micro_batch={micro}", f"train.graphs={graphs}", *args.sets
        ]
        for method, micro, graphs in itertools.product(args.methods, args.micro, args.graphs)
    }  # fmt: skip
    times: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    peaks: dict[str, float] = dict.fromkeys(arms, 0.0)
    for _ in range(args.rounds):
        for arm, sets in arms.items():
            rows, peak = run(args.preset, sets, args.steps)
            print(f"{arm}: {rows[-1]}", flush=True)
            times[arm] += rows
            peaks[arm] = max(peaks[arm], peak)
    first = None
    results = {}
    for arm, rows in times.items():
        medians = {name: statistics.median(row[name] for row in rows) for name in TIMES}
        step, rollout, update = medians.values()
        first = first or update
        results[arm] = {**medians, "update_ratio": update / first, "peak_gib": peaks[arm]}
        print(
            f"{arm:48} step {step:6.3f} s  rollout {rollout:6.3f}  update {update:6.3f} "
            f"({update / first:5.2f}x)  peak {peaks[arm]:5.1f} GiB"
        )
    if args.json:
        args.json.write_text(json.dumps({"preset": args.preset, "arms": results}, indent=1))


if __name__ == "__main__":
    main()
