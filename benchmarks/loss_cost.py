"""Forward + backward of every recipe's loss, relative to plain REINFORCE, in one run.

    python benchmarks/loss_cost.py                       256 x 4,096 tokens, float32, this machine
    python benchmarks/loss_cost.py --rows 64 --tokens 512 --json out.json
    python benchmarks/loss_cost.py --device cuda --methods bapo capo

Repeats are interleaved: each round runs every recipe once; the table shows medians of the rounds.
Beside the time stand the tensor operations of one loss (on a GPU its kernels and copies) and the
number of times the host waits for the device: measured on a GPU, on the CPU the operations that
would wait there. A recipe that fails is named and left out.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from record import Record
from torch.utils._python_dispatch import TorchDispatchMode

import proxpo
from proxpo.recipes import methods
from proxpo.types import Clock

# Narrow, so that the batch fits: methods that read distributions or hidden states of every token
# cost in proportion to these sizes.
VOCABULARY, LATENT = 8, 4
CLOCK = Clock(step=1, steps=10, learning_rate=1e-6)
# Operations whose result, or whose shape, the host has to know; `index` only by booleans.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero")


class Counts(NamedTuple):
    """Operations of one loss and its backward, and waits for the device among them."""

    operations: int
    waits: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="beside reinforce; all if none"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    record = Record(args.json)
    record.data |= {"rows": args.rows, "tokens": args.tokens}
    batch = make_batch(args.rows, args.tokens, args.device)
    chosen = ["reinforce", *args.methods] if args.methods else methods("language")
    timers: dict[str, Callable[[], float]] = {}
    counts: dict[str, Counts] = {}
    for slug in chosen:
        try:
            run = timer(methods()[slug].make(), batch)
            run()  # warm-up: caches of filter tables, allocator
            counts[slug] = count(run, args.device)
            timers[slug] = run
        except Exception as error:
            print(f"{slug}: left out, {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    seconds: dict[str, list[float]] = {slug: [] for slug in timers}
    for _ in range(args.rounds):
        for slug, run in timers.items():
            seconds[slug].append(run())
    medians = {slug: statistics.median(values) for slug, values in seconds.items()}
    base = medians["reinforce"]
    print(f"{args.rows} x {args.tokens} tokens, float32, {args.device}, {args.rounds} rounds")
    print(f"reinforce: {base * 1e3:.1f} ms")
    for slug, value in sorted(medians.items(), key=lambda pair: pair[1]):
        print(
            f"{slug:24s} {value / base:5.2f}x  {value * 1e3:8.1f} ms  "
            f"{counts[slug].operations:4d} operations  {counts[slug].waits:3d} waits"
        )
        entry = {"relative": value / base, "seconds": value, **counts[slug]._asdict()}
        record.add(slug, entry)


def timer(recipe: proxpo.Recipe, batch: proxpo.Batch):
    """A function that runs the loss and its backward once and returns the seconds it took.

    Advantages are prepared beforehand, once per rollout as in training; the update is what repeats.
    """
    drawn = proxpo.Context(generator=torch.Generator().manual_seed(0))
    ready = proxpo.prepare(recipe, batch, drawn)
    ctx = proxpo.Context(denominators=ready.ctx.denominators, clock=CLOCK)

    def run() -> float:
        logp = batch.logp.detach().clone().requires_grad_()
        current = ready.batch.replace(logp=logp)
        _wait(logp)
        start = time.perf_counter()
        loss = proxpo.policy_loss(recipe, current, ctx)
        loss.value.backward()
        _wait(logp)
        return time.perf_counter() - start

    return run


def count(run: Callable[[], float], device: str) -> Counts:
    """Counts of one run: kernels, copies and waits on a GPU, dispatched operations on the CPU."""
    if not device.startswith("cuda"):
        with _Operations() as seen:
            run()
        return Counts(len(seen.names), sum(map(_waits, seen.names)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns once that it does not see all waits
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return Counts(len(events), waits)


class _Operations(TorchDispatchMode):
    """Names of the operations dispatched inside the block, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ != "detach":
            booleans = func.overloadpacket.__name__.startswith("index") and _by_mask(args)
            self.names.append("nonzero" if booleans else func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _by_mask(args: Iterable[object]) -> bool:
    """True if one of an indexing operation's indices is a mask."""
    indices = [x for arg in args if isinstance(arg, (list, tuple)) for x in arg]
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices)


def _waits(name: str) -> bool:
    return name.startswith(WAITS)


def make_batch(rows: int, tokens: int, device: str) -> proxpo.Batch:
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> torch.Tensor:
        return (scale * torch.randn(rows, tokens, generator=generator)).to(device)

    def wide(size: int) -> torch.Tensor:
        return torch.randn(rows, tokens, size, generator=generator).to(device)

    old = -noise(1.0).abs()
    vocabulary = wide(VOCABULARY).log_softmax(dim=-1)
    mean = wide(LATENT)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=generator)
    return proxpo.Batch(
        logp=old + noise(0.1),
        old_logp=old,
        ref_logp=old + noise(0.2),
        rollout_logp=old + noise(0.02),
        prox_logp=old + noise(0.05),
        entropy=noise(1.0).abs(),
        values=noise(0.1),
        old_values=noise(0.1),
        lag=torch.randint(0, 4, (rows, tokens), generator=generator).to(device),
        mask=(torch.arange(tokens)[None] < lengths).to(device),
        rewards=torch.randint(0, 2, (rows,), generator=generator).float().to(device),
        greedy_rewards=torch.zeros(rows, device=device),
        group=(torch.arange(rows) // 8).to(device),
        truncated=torch.zeros(rows, dtype=torch.bool, device=device),
        prev_logp=old + noise(0.05),
        ref_kl=noise(0.1).abs(),
        tokens=torch.randint(0, VOCABULARY, (rows, tokens), generator=generator).to(device),
        turn=(torch.arange(tokens) // 256).expand(rows, -1).to(device),
        prompt_id=(torch.arange(rows) // 8).to(device),
        duration=torch.rand(rows, generator=generator).to(device),
        void=torch.zeros(rows, dtype=torch.bool, device=device),
        correct=torch.randint(0, 2, (rows,), generator=generator).bool().to(device),
        span_rewards=noise(1.0).sign(),
        features=torch.randn(rows, LATENT, generator=generator).to(device),
        hidden=wide(LATENT),
        vocab_logp=vocabulary,
        old_vocab_logp=(vocabulary + 0.1 * wide(VOCABULARY)).log_softmax(dim=-1),
        mean=mean,
        old_mean=mean + 0.1 * wide(LATENT),
        noise=noise(1.0).abs() + 0.1,
        step_size=torch.full((rows, tokens), 0.1, device=device),
        time=torch.full((rows, tokens), 0.5, device=device),
    )


def _wait(like: torch.Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
