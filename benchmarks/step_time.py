"""One RL step of proxpo against TRL's GRPOTrainer: same model, prompts, group size and length.

    python benchmarks/step_time.py                       the model in the box on the CPU
    python benchmarks/step_time.py --prompts 32 --samples 8 --steps 12

Both train GRPO on the arithmetic task in float32, one update per rollout, no reference model. The
runs take turns, a block of steps each; the median step counts, and ours is split into its parts.
Last comes what the matrix products of our update take by themselves, timed in the same run: no
update in float32 can be faster.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peers import train_trl

import proxpo.backward as backward
from proxpo.models import load_policy
from proxpo.sampler import LocalSampler
from proxpo.train import collect, minibatch
from proxpo.train import update as update_module
from proxpo.train.config import load_config
from proxpo.train.loop import train
from proxpo.train.observer import Observer
from proxpo.train.tasks import make_task

PHASES = ("step_time", "proxpo/time/rollout", "proxpo/time/update", "proxpo/time/sync")
LENGTH = "completions/mean_length"
# Parts of a phase: where the function is looked up, its name, and the phase it belongs to.
PARTS = {
    "sampling": (LocalSampler, "sample", "rollout"),
    "decoding and rewards": (collect, "grade", "rollout"),
    "forward": (minibatch, "forward", "update"),
    "loss": (backward, "policy_loss", "update"),
    "backward": (torch.Tensor, "backward", "update"),
    "clip and optimizer": (update_module, "optimizer_step", "update"),
}


@contextmanager
def clocked() -> Iterator[Counter[str]]:
    """Seconds spent in each part since the counter was last cleared."""
    spent: Counter[str] = Counter()
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS.values()]
    for part, (owner, name, function) in zip(PARTS, kept):
        setattr(owner, name, _clocked(function, part, spent))
    try:
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def _clocked(function: Callable, part: str, spent: Counter[str]) -> Callable:
    def run(*args: object, **options: object) -> object:
        start = time.perf_counter()
        result = function(*args, **options)
        spent[part] += time.perf_counter() - start
        return result

    return run


def ours(args: argparse.Namespace, round_number: int) -> list[dict[str, float]]:
    """Seconds of each step, of its phases and their parts."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as out, clocked() as spent:
        sets = [
            f"prompts_per_step={args.prompts}",
            f"samples_per_prompt={args.samples}",
            f"rollout.max_tokens={args.tokens}",
            f"steps={args.steps + 1}",
            "evaluate.every=0",
            "evaluate.size=8",
            "checkpoint.every=0",
        ]

        def note(step: int, metrics: dict[str, float]) -> None:
            rows.append({name: metrics[name] for name in (*PHASES, LENGTH)} | dict(spent))
            spent.clear()

        train(
            load_config(None, sets, overrides={"method": "grpo", "out": out, "seed": round_number}),
            observer=Observer(on_step=note),
        )
    return rows[1:-1]  # the first one warms up, the last one evaluates


def theirs(args: argparse.Namespace, round_number: int) -> list[float]:
    """Seconds of each step of GRPOTrainer."""
    task, seconds = make_task("arithmetic"), []
    train_trl(
        load_policy("tiny"),
        task,
        [task.train[i] for i in range(args.prompts * args.steps)],
        prompts=args.prompts,
        samples=args.samples,
        tokens=args.tokens,
        lr=3e-5,
        seed=round_number,
        on_step=lambda row: seconds.append(row["step"]),
    )
    return seconds[1:]


def products(args: argparse.Namespace, length: float) -> float:
    """Seconds of the update's matrix products alone: each prompt once, each response but its last
    token, for responses of so many tokens."""
    model = load_policy("tiny").model
    prompt = len(make_task("arithmetic").train[0].prompt)
    tokens = args.prompts * prompt + round(args.prompts * args.samples * (length - 1))
    shapes = [p.shape for n, p in model.named_parameters() if p.dim() == 2 and "layers." in n]
    seconds = 0.0
    for out, inp in shapes:
        x, w, g = torch.randn(tokens, inp), torch.randn(inp, out), torch.randn(tokens, out)
        start = time.perf_counter()
        _ = x @ w, g @ w.T, x.T @ g
        seconds += time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    mine: list[dict[str, float]] = []
    other: list[float] = []
    floor: list[float] = []
    for number in range(args.rounds):
        other += theirs(args, number)
        mine += ours(args, number)
        floor += [products(args, mine[-1][LENGTH]) for _ in range(5)]
    found = {name: 1e3 * statistics.median(row[name] for row in mine) for name in mine[0]}
    report(args, 1e3 * statistics.median(other), found, 1e3 * statistics.median(floor))
    if args.json:
        Path(args.json).write_text(json.dumps({"trl": other, "proxpo": mine}, indent=1))


def report(args: argparse.Namespace, trl: float, found: dict[str, float], products_: float) -> None:
    """The table, in milliseconds."""
    shape = f"{args.prompts} prompts x {args.samples} samples x {args.tokens} tokens"
    print(f"{shape}, {torch.get_num_threads()} threads; milliseconds, medians")
    print(f"{'TRL GRPOTrainer':<30}{trl:8.1f}")
    print(f"{'proxpo':<30}{found['step_time']:8.1f}   {trl / found['step_time']:.2f}x faster")
    for name in PHASES[1:]:
        phase = name.rsplit("/", 1)[1]
        parts = [part for part, (*_, belongs) in PARTS.items() if belongs == phase]
        print(f"  {phase:<28}{found[name]:8.1f}")
        for part in parts:
            print(f"    {part:<26}{found[part]:8.1f}")
        if parts:
            print(f"    {'the rest':<26}{found[name] - sum(found[p] for p in parts):8.1f}")
    print(f"{'products of the update alone':<30}{products_:8.1f}")


if __name__ == "__main__":
    main()
