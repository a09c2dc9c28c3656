"""Forward and backward with and without ISOPO, each size doubled four times: time and peak memory.

    python benchmarks/growth.py --json growth.json       a small model on the CPU, or on a GPU one
                                                         like Qwen3-0.6B with fewer layers
    python benchmarks/growth.py --axes tokens hidden

    tokens      the length of 8 sequences        overlap   M, the positions of J
    sequences   of the same tokens in all        layers    of the model
    hidden      size of the states, with heads and inner size in proportion

Beside each point stands the cost law: 6 T O D operations a layer O x D without ISOPO (and those of
attention), min(2 M T (O + D), 2 m M O D) more with it, for T tokens in m sequences. On a GPU both
are timed launched from Python and as replayed CUDA graphs; on a CPU the seconds of the process
count. Both take turns; medians. `make docs` draws docs/isopo/results/growth-*.json.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from isopo_overhead import SMALL, Case, build, measured, recorded, run
from record import Deadline, Record
from torch.profiler import ProfilerActivity
from update_peak import operations

from proxpo import gradients


class Size(NamedTuple):
    """Sizes of a model and its batch: `sequences` of `tokens` in all; `overlap` of ISOPO."""

    tokens: int
    sequences: int
    overlap: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int

    @property
    def shape(self) -> dict[str, Any]:
        """The model's config."""
        width = self.hidden // self.heads
        return SMALL | {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2, "head_dim": width,
            "intermediate_size": 3 * self.hidden, "max_position_embeddings": 16384,
        }  # fmt: skip

    @property
    def length(self) -> int:
        return self.tokens // self.sequences


# The third value of each axis is the common point.
GPU = Size(8192, 8, 64, 8, 1024, 16, 32768)
GPU_AXES = {
    "tokens": (2048, 4096, 8192, 16384, 32768),
    "sequences": (2, 4, 8, 16, 32),
    "overlap": (16, 32, 64, 128, 256),
    "layers": (2, 4, 8, 16, 32),
    "hidden": (256, 512, 1024, 2048, 4096),
}
CPU = Size(1024, 8, 64, 2, 128, 4, 256)
CPU_AXES = {
    "tokens": (256, 512, 1024, 2048, 4096),
    "sequences": (2, 4, 8, 16, 32),
    "overlap": (16, 32, 64, 128, 256),
    "layers": (1, 2, 4, 8, 16),
    "hidden": (32, 64, 128, 256, 512),
}


def law(size: Size) -> tuple[float, float]:
    """Operations of forward and backward, and what ISOPO's F adds to them."""
    shape, heads = size.shape, size.hidden  # heads x head_dim is the hidden size
    kv, inner, tokens = heads // 2, shape["intermediate_size"], size.tokens
    layer = [(heads, size.hidden), (kv, size.hidden), (kv, size.hidden), (size.hidden, heads)]
    layer += [(inner, size.hidden), (inner, size.hidden), (size.hidden, inner)]
    matrices = [*(layer * size.layers), (size.vocabulary, size.hidden)]
    overlap = min(size.overlap, tokens)
    gram = [2.0 * overlap * tokens * (out + inp) for out, inp in matrices]
    stacked = [2.0 * size.sequences * overlap * out * inp for out, inp in matrices]
    products, attention = operations(shape, size.sequences, size.length)
    return products + attention, sum(map(min, gram, stacked))


def cpu_peak(work: Callable[[], None]) -> float:
    """The most memory in GiB that torch took at once during the work."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**30


def measure(size: Size, device: str, repeats: int, *, graphs: bool) -> dict[str, Any]:
    """Milliseconds and GiB of both methods at one size; graphs: replayed on a GPU."""
    case = Case("", size.shape, size.sequences, size.length)
    model = build(case, device)
    ids = torch.randint(0, size.vocabulary, (case.rows, case.length), device=device)
    seq = torch.arange(case.rows, device=device)[:, None].expand(case.rows, case.length)
    inputs = (ids, seq, torch.randn(case.rows, device=device))
    methods = {"reinforce": None, "isopo": gradients.isopo(overlap=size.overlap)}

    def eager(method: object) -> Callable[[], None]:
        def work() -> None:
            model.zero_grad(set_to_none=True)
            run(model, method, *inputs)

        return work

    works = {name: eager(method) for name, method in methods.items()}
    entry: dict[str, Any] = {}
    entry["ms"], peaks = _timed(works, device, repeats)
    if device == "cuda":
        entry["peak_gib"] = peaks
        entry["launched_ms"] = entry["ms"]
    if device == "cuda" and graphs:
        model.zero_grad(set_to_none=True)
        pool = torch.cuda.graph_pool_handle()  # they run in turn, and nobody reads a result
        replays = {name: recorded(model, method, inputs, pool) for name, method in methods.items()}
        entry["ms"], _ = _timed(replays, device, repeats)
    if device == "cpu":
        entry["peak_gib"] = {}
        for name, work in works.items():
            model.zero_grad(set_to_none=True)  # before the trace, in which it would count as given
            entry["peak_gib"][name] = cpu_peak(work)
    entry["law"] = dict(zip(("reinforce", "isopo"), law(size)))
    entry["law"]["isopo"] += entry["law"]["reinforce"]
    return entry


def _timed(
    works: dict[str, Callable[[], None]], device: str, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians in milliseconds of the works in turn, after two that warm up; their peaks in GiB."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    peaks: dict[str, float] = {}
    for _ in range(repeats + 2):
        for name, work in works.items():
            taken, peaks[name] = measured(device, work)
            seconds[name].append(taken)
    return {name: 1e3 * statistics.median(taken[2:]) for name, taken in seconds.items()}, peaks


def main() -> None:
    gpu = torch.cuda.is_available()
    base, axes = (GPU, GPU_AXES) if gpu else (CPU, CPU_AXES)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", nargs="+", choices=axes, default=list(axes))
    parser.add_argument("--points", type=int, default=5, help="of each axis, from the smallest")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--launched", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no point after these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record, deadline = Record(args.json), Deadline(args.seconds)
    record.data["base"] = base._asdict()
    for axis in args.axes:
        for value in axes[axis][: args.points]:
            name = f"{axis}={value}"
            if name in record or deadline.over:
                continue
            size = base._replace(**{axis: value})
            device = "cuda" if gpu else "cpu"
            entry = measure(size, device, args.repeats, graphs=not args.launched)
            record.add(name, entry)
            time, cost, peak = (entry[key] for key in ("ms", "law", "peak_gib"))
            print(
                f"{name:<16}{time['reinforce']:9.2f} ms  isopo {time['isopo']:9.2f} ms "
                f"{time['isopo'] / time['reinforce']:6.3f}x  law "
                f"{cost['isopo'] / cost['reinforce']:6.3f}x  memory "
                f"{peak['isopo'] / peak['reinforce']:6.3f}x",
                flush=True,
            )
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
