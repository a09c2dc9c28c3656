"""What log-probabilities cost: naive log-softmax against the fused head, plain and transformed.

    python benchmarks/fused_head.py                      # toy size, CPU
    python benchmarks/fused_head.py --device cuda        # Qwen3-0.6B shape, 8 x 1024, bfloat16
    python benchmarks/fused_head.py --json results.json

Three tables: the head alone, a whole training step (forward and backward of the model), and that
with activation checkpointing. Time and
peak memory are ratios to the naive row of the same run; repeats are interleaved and the median
counts. In the rows with a transform it is applied to the head alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from proxpo import gradients
from proxpo.logp import model_logp, token_logp

Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    rows: int
    length: int
    vocab: int
    hidden: int
    layers: int
    heads: int
    dtype: torch.dtype

    @property
    def two_passes(self) -> int:
        """A budget of logits that holds no whole sequence: ISOPO has to go over them twice."""
        return self.length * self.vocab // 3


TOY = Size(4, 128, 4096, 64, 2, 4, torch.float32)
REAL = Size(8, 1024, 151_936, 1024, 28, 16, torch.bfloat16)


def naive(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]


class Case:
    """A head on top of given hidden states, or of a whole model."""

    def __init__(self, size: Size, device: str) -> None:
        self.size = size
        shape = (size.rows, size.length)
        self.ids = torch.randint(0, size.vocab, shape, device=device)
        self.targets = self.ids.roll(-1, dims=1)
        self.mask = torch.ones(shape, dtype=torch.bool, device=device)
        self.mask[:, -1] = False
        self.sequences = torch.arange(size.rows, device=device)[:, None].expand(shape)
        self.advantages = torch.randn(size.rows, device=device)

    def steps(self) -> dict[str, Step]:
        isopo = gradients.isopo(p=-1.0, overlap=64)
        return {
            "naive log-softmax": self.step(self.naive),
            "fused": self.step(self.fused),
            "fused + isopo 64": self.step(self.fused, isopo),
            "fused + isopo 64, two passes": self.step(
                lambda: self.fused(chunk=self.size.two_passes), isopo
            ),
            "fused + isopo q=-1": self.step(self.fused, gradients.isopo(preset="euclidean")),
            "fused + ntk": self.step(self.fused, gradients.isopo_ntk()),
        }

    def step(self, logp: Callable[[], Tensor], transform: Any = None) -> Step:
        def run() -> None:
            self.clear()
            block = nullcontext()
            if transform is not None:
                block = transform.applied(
                    self.head, sequences=self.sequences, advantages=self.advantages
                )
            with block:
                (-logp().sum()).backward()

        return run

    head: nn.Linear
    naive: Callable[[], Tensor]
    fused: Callable[..., Tensor]
    clear: Callable[[], None]


class HeadAlone(Case):
    def __init__(self, size: Size, device: str) -> None:
        super().__init__(size, device)
        kind = {"device": device, "dtype": size.dtype}
        self.head = nn.Linear(size.hidden, size.vocab, bias=False, **kind)
        self.hidden = torch.randn(size.rows, size.length, size.hidden, **kind).requires_grad_()

    def naive(self) -> Tensor:
        return naive(self.head(self.hidden), self.targets) * self.mask

    def fused(self, chunk: int | None = None) -> Tensor:
        weight, targets = self.head.weight, self.targets
        return token_logp(self.hidden, weight, targets, mask=self.mask, chunk=chunk)

    def clear(self) -> None:
        self.head.weight.grad = self.hidden.grad = None


class WholeStep(Case):
    def __init__(self, size: Size, device: str) -> None:
        super().__init__(size, device)
        config = transformers.Qwen3Config(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            head_dim=2 * size.hidden // size.heads,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
        with torch.device(device):
            self.model = transformers.Qwen3ForCausalLM(config).to(size.dtype)
        self.head = self.model.lm_head

    def naive(self) -> Tensor:
        return naive(self.model(self.ids, use_cache=False).logits, self.targets) * self.mask

    def fused(self, chunk: int | None = None) -> Tensor:
        return model_logp(self.model, self.ids, self.mask.roll(1, dims=1), chunk=chunk)

    def clear(self) -> None:
        self.model.zero_grad()


class CheckpointedStep(WholeStep):
    """The same with activation checkpointing, as long sequences are trained."""

    def __init__(self, size: Size, device: str) -> None:
        super().__init__(size, device)
        self.model.train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Step, device: str) -> int:
    """The most memory held at once; on the CPU from the profiler's record of allocations."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def measure(steps: dict[str, Step], device: str, repeats: int) -> list[dict[str, Any]]:
    for step in steps.values():  # compilation, caches, the allocator's pools
        step()
        step()
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    medians = {name: statistics.median(found) for name, found in times.items()}
    first = next(iter(steps))
    return [
        {
            "row": name,
            "ms": 1e3 * medians[name],
            "time": medians[name] / medians[first],
            "mib": peaks[name] / 2**20,
            "memory": peaks[name] / peaks[first],
        }
        for name in steps
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'':30}{'ms':>10}{'time':>9}{'MiB':>10}{'memory':>9}")
    for row in rows:
        numbers = f"{row['ms']:10.1f}{row['time']:8.2f}x{row['mib']:10.0f}{row['memory']:8.2f}x"
        print(f"{row['row']:30}{numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    size = REAL if options.device == "cuda" else TOY
    torch.manual_seed(0)
    shape = f"{size.rows} x {size.length} x {size.vocab}, hidden {size.hidden}, {size.dtype}"
    results: dict[str, Any] = {"shape": shape, "device": options.device, "torch": torch.__version__}
    kinds = {
        "head alone": HeadAlone,
        "whole step": WholeStep,
        "whole step, checkpointed": CheckpointedStep,
    }
    for title, kind in kinds.items():
        case = kind(size, options.device)
        results[title] = measure(case.steps(), options.device, options.repeats)
        show(f"{title}: {shape}", results[title])
        del case
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
