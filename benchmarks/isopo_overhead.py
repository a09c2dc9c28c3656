"""What ISOPO costs: forward + backward time and peak memory against REINFORCE, in the same run.

    python benchmarks/isopo_overhead.py                   a toy model on the CPU
    python benchmarks/isopo_overhead.py --device cuda     Qwen3-0.6B shape in bf16, wider, shorter
    ... --device cuda --graphs     the same replayed as CUDA graphs: without the host's launches
    ... --host                     time and operations of the host per parameter, tiny kernels

Every row runs the same model on the same tokens with the same log-probabilities; repeats are
interleaved, and the median counts. The last row is the loop of arXiv:2512.23353, figure 2, as
printed: hooks that keep clones, one sequence after the other, in float32.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from proxpo import gradients

SMALL = {
    "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
WIDE = SMALL | {
    "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
    "intermediate_size": 12288,
}  # fmt: skip
SHORT = SMALL | {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
}  # fmt: skip
TOY = SMALL | {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    config: dict
    rows: int
    length: int
    checkpointed: bool = False


NARROW = SMALL | {
    "vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "intermediate_size": 8,
}  # fmt: skip


CUDA = (
    Case("8x1024", SMALL, 8, 1024),
    Case("32x256", SMALL, 32, 256),
    Case("2x4096", SMALL, 2, 4096),
    Case("8x1024 checkpointed", SMALL, 8, 1024, checkpointed=True),
    Case("8x1024 wide", WIDE, 8, 1024),
    Case("64x256", SMALL, 64, 256),
    Case("64x48 of 135M", SHORT, 64, 48),
    Case("512x48 of 135M", SHORT, 512, 48),
)
CPU = (
    Case("8x128", TOY, 8, 128),
    Case("64x16", TOY, 64, 16),
    Case("8x128 checkpointed", TOY, 8, 128, checkpointed=True),
)


class PaperLoop:
    """Figure 2 of the paper on every nn.Linear: p = -1, all that autograd computed thrown away."""

    def __init__(self, overlap: int) -> None:
        self.overlap = overlap

    @contextmanager
    def applied(self, model: nn.Module, *, sequences: Tensor, advantages: Tensor) -> Iterator[None]:
        seq = sequences.reshape(-1)
        members = [(seq == i).nonzero()[:, 0] for i in range(len(advantages))]
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        held: dict[nn.Module, Tensor] = {}
        grads: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            held[module] = args[0].detach().clone()

        def backward(module: nn.Module, _: object, grad_out: tuple[Tensor, ...]) -> None:
            act = held.pop(module).flatten(0, -2).float()
            g = grad_out[0].flatten(0, -2).float()
            picks = torch.randperm(len(g), device=g.device)[: self.overlap]
            a0, g0 = act[picks], g[picks]
            total = torch.zeros(g.shape[1], act.shape[1], device=g.device)
            for i, place in enumerate(members):
                v = g[place].T @ act[place]
                f = ((g0 @ v) * a0).sum(1).norm() / (g0.norm(dim=1) * a0.norm(dim=1)).norm()
                total += advantages[i] * v / (f.square() + 1e-8).sqrt()
            grads[module] = total

        hooks = [m.register_forward_hook(keep) for m in linears]
        hooks += [m.register_full_backward_hook(backward) for m in linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for module, total in grads.items():
            module.weight.grad = total.to(module.weight.dtype)


def methods() -> dict[str, object]:
    return {
        "reinforce": None,
        "isopo, 64 samples": gradients.isopo(overlap=64),
        "isopo, 250 samples": gradients.isopo(overlap=250),
        "isopo euclidean": gradients.isopo(preset="euclidean"),
        "isopo r = -2, 64": gradients.isopo(preset="nearest-npg", overlap=64),
        "isopo reg = 1, 64": gradients.isopo(overlap=64, reg=1.0),
        "isopo-ntk": gradients.isopo_ntk(),
        "isopo-ntk, groups of 8": gradients.isopo_ntk(group_by="prompt"),
        "the paper's loop, 250": PaperLoop(250),
    }


def nll(model: nn.Module, ids: Tensor) -> Tensor:
    """-log π of every token but the first of its row, per position."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def run(model: nn.Module, method: object, ids: Tensor, seq: Tensor, advantages: Tensor) -> None:
    """One forward and backward; p.grad is what the optimizer would descend."""
    if method is None:
        weights = advantages[seq[:, 1:]].flatten()
        (nll(model, ids) * weights).sum().backward()
        return
    groups = {"groups": seq[:, 0] // 8} if isinstance(method, gradients.Transform) else {}
    with method.applied(model, sequences=seq, advantages=advantages, **groups):  # type: ignore
        nll(model, ids).sum().backward()


def build(case: Case, device: str) -> nn.Module:
    torch.manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    config = Qwen3Config(**case.config, attn_implementation="sdpa")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=kind).train()
    if case.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def measured(device: str, work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and the peak in GiB. On the CPU: seconds of this process, and no peak."""
    if device != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start, 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30


def measure(case: Case, device: str, repeats: int, chosen: dict[str, object]) -> list[dict]:
    model = build(case, device)
    ids = torch.randint(0, case.config["vocab_size"], (case.rows, case.length), device=device)
    seq = torch.arange(case.rows, device=device)[:, None].expand(case.rows, case.length)
    advantages = torch.randn(case.rows, device=device)
    times: dict[str, list[float]] = {name: [] for name in chosen}
    peaks: dict[str, float] = {}
    for repeat in range(repeats + 2):
        for name, method in chosen.items():
            if repeat > 2 and name.startswith("the paper"):
                continue  # slow, and three repeats say enough
            model.zero_grad(set_to_none=True)
            seconds, peak = measured(device, lambda m=method: run(model, m, ids, seq, advantages))
            if repeat >= 2 or (repeat == 1 and name.startswith("the paper")):
                times[name].append(seconds)
                peaks[name] = max(peaks.get(name, 0.0), peak)
            if hasattr(method, "step"):
                method.step()
    base = statistics.median(times["reinforce"])
    return [
        {
            "case": case.name,
            "method": name,
            "ms": 1e3 * statistics.median(times[name]),
            "time": statistics.median(times[name]) / base,
            "gib": peaks[name],
            "memory": peaks[name] / peaks["reinforce"] if peaks["reinforce"] else None,
        }
        for name in chosen
    ]


def recorded(
    model: nn.Module, method: object, inputs: tuple[Tensor, ...], pool: Any
) -> Callable[[], None]:
    """The forward and backward as a CUDA graph, so that launching kernels costs nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            run(model, method, *inputs)
            if hasattr(method, "step"):
                method.step()  # its trailing averages are known, as from the second step on
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run(model, method, *inputs)
    model.zero_grad(set_to_none=True)  # the graph keeps its own
    torch.cuda.empty_cache()
    return graph.replay


def measure_graphs(case: Case, repeats: int, chosen: dict[str, object]) -> list[dict]:
    """Time on the device alone: every method replayed from its graph, in turn."""
    model = build(case, "cuda")
    ids = torch.randint(0, case.config["vocab_size"], (case.rows, case.length), device="cuda")
    seq = torch.arange(case.rows, device="cuda")[:, None].expand(case.rows, case.length)
    inputs = (ids, seq, torch.randn(case.rows, device="cuda"))
    pool = torch.cuda.graph_pool_handle()  # one for all: they run in turn, nobody reads a result
    replays = {name: recorded(model, method, inputs, pool) for name, method in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for repeat in range(repeats + 2):
        for name, replay in replays.items():
            seconds, _ = measured("cuda", replay)
            if repeat >= 2:
                times[name].append(seconds)
    base = statistics.median(times["reinforce"])
    return [
        {
            "case": f"{case.name}, graph",
            "method": name,
            "ms": 1e3 * statistics.median(times[name]),
            "time": statistics.median(times[name]) / base,
            "gib": 0.0,
            "memory": None,
        }
        for name in chosen
    ]


def profile(case: Case, device: str, method: object) -> None:
    """The kernels of one forward and backward, most expensive first."""
    model = build(case, device)
    ids = torch.randint(0, case.config["vocab_size"], (case.rows, case.length), device=device)
    seq = torch.arange(case.rows, device=device)[:, None].expand(case.rows, case.length)
    advantages = torch.randn(case.rows, device=device)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        run(model, method, ids, seq, advantages)
    with torch.profiler.profile(activities=kinds) as trace:
        model.zero_grad(set_to_none=True)
        run(model, method, ids, seq, advantages)
        if device == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(trace.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70))


class Operations(TorchDispatchMode):
    """Counts the operations that reach a device: views and queries do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten._unsafe_view.default)
        return func(*args, **(kwargs or {}))


def measure_host(repeats: int) -> list[dict]:
    """Time of the host per parameter beyond REINFORCE: 28 layers of width 8, six positions."""
    model = build(Case("host", NARROW, 2, 1), "cpu")
    count = len(list(model.parameters()))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    seq, advantages = torch.tensor([[0], [1]]).expand(2, 3), torch.randn(2)
    chosen: dict[str, Any] = {
        "reinforce": None,
        "p = -1": gradients.isopo(overlap=2),
        "q = -1 (euclidean)": gradients.isopo(preset="euclidean"),
        "r = -2": gradients.isopo(preset="nearest-npg", overlap=2),
        "p = -1, reg": gradients.isopo(overlap=2, reg=0.1),
        "isopo-ntk": gradients.isopo_ntk(),
    }
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in chosen}

    def passes(method: Any, marks: list[float]) -> None:
        """Notes the time at the ends of opening, forward, backward and closing."""
        block = method.applied(model, sequences=seq, advantages=advantages) if method else None
        with block or nullcontext():
            marks.append(time.process_time())
            loss = nll(model, ids).sum()
            marks.append(time.process_time())
            loss.backward()
            marks.append(time.process_time())
        marks.append(time.process_time())

    operations = {}
    for repeat in range(repeats + 3):
        for name, method in chosen.items():
            model.zero_grad(set_to_none=True)
            marks = [time.process_time()]
            if repeat == 2:
                with Operations() as mode:
                    passes(method, marks)
                operations[name] = mode.count / count
            else:
                passes(method, marks)
            if repeat > 2:
                times[name].append(tuple(b - a for a, b in pairwise(marks)))
            if method is not None:
                method.step()
    rows = []
    for name, measured_ in times.items():
        parts = [1e6 * statistics.median(part) / count for part in zip(*measured_)]
        rows.append({"method": name, "operations": operations[name], "us": parts})
    return rows


def host_table(rows: list[dict]) -> str:
    head = ("open", "forward", "backward", "close", "more", "ops", "more ops")
    lines = [f"{'us per parameter':<22}" + "".join(f"{name:>10}" for name in head)]
    base = rows[0]
    for row in rows:
        more = sum(row["us"]) - sum(base["us"])
        numbers = [*row["us"], more, row["operations"], row["operations"] - base["operations"]]
        lines.append(f"{row['method']:<22}" + "".join(f"{x:>10.1f}" for x in numbers))
    return "\n".join(lines)


def table(results: list[dict]) -> str:
    lines = [f"{'case':<22}{'method':<24}{'ms':>9}{'time':>8}{'GiB':>8}{'memory':>9}"]
    for row in results:
        memory = "" if row["memory"] is None else f"{row['memory']:.3f}x"
        lines.append(
            f"{row['case']:<22}{row['method']:<24}{row['ms']:>9.1f}{row['time']:>7.3f}x"
            f"{row['gib']:>8.2f}{memory:>9}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="cases and methods whose name contains this")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs of each method")
    parser.add_argument("--host", action="store_true", help="time of the host per parameter")
    parser.add_argument("--profile", action="store_true", help="kernels of isopo and of reinforce")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    if options.host:
        rows = measure_host(options.repeats)
        print(host_table(rows))
        write(options.json, rows)
        return
    cases = CUDA if options.device == "cuda" else CPU
    if options.profile:
        for name in ("reinforce", "isopo, 64 samples"):
            print(name)
            profile(cases[0], options.device, methods()[name])
        return
    results: list[dict] = []
    for case in cases:
        wanted = {
            name: method
            for name, method in methods().items()
            if options.only in case.name or name == "reinforce" or options.only in name
        }
        if len(wanted) == 1:
            continue
        if options.graphs:
            wanted = {k: m for k, m in wanted.items() if not k.startswith("the paper")}
            results += measure_graphs(case, options.repeats, wanted)
        else:
            results += measure(case, options.device, options.repeats, wanted)
        print(table(results[-len(wanted) :]), flush=True)
        write(options.json, results)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def write(path: str | None, results: list[dict]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
