"""Tokens per second of the local sampler against `transformers.generate` and vLLM, in one run.

    python benchmarks/rollout_speed.py                  # the tiny model, 256 rows, CPU
    python benchmarks/rollout_speed.py --task           # the same as the quickstart draws them
    python benchmarks/rollout_speed.py --device cuda --json 'docs/speed/rollouts-{rows}.json'
    python benchmarks/rollout_speed.py --device cuda --shape smollm2 --rows 128

On a GPU: 128 and 512 rows of 256 tokens, Qwen3-0.6B's shape with random weights, bfloat16. Results
are printed, and written to the file of each number of rows, as they come. Every row runs to the
full length (no end-of-sequence token); prompts are shared by `--samples` rows. With --task the
prompts are those of the arithmetic task, responses end where the model ends them or after 6 tokens,
and both samplers stop when all have ended: what a training step waits for. The median of the
repeats counts, after one run that warms up; on a CPU the samplers take turns.

first token: seconds from a fresh sampler to the first token of all rows, compilation included.
Two more rates are taken in the same run: the matrix products of decoding alone, and these with the
attention and the activation, one kernel each, launched from Python. The profile is the GPU's time
of a decoding step by part; `host` is the time without a kernel. On a GPU `generate` draws 32 tokens
only. vLLM runs last, where it can be imported. The gap is that of the sampled tokens'
log-probabilities to a full forward pass.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import kernel_profile
from record import synchronised
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from proxpo.models import Policy, load_policy
from proxpo.sampler import agreement, make_sampler
from proxpo.train.tasks import make_task

NEVER = -1  # a token id that does not occur
SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "smollm2": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


def large_policy(shape: str, device: torch.device) -> Policy:
    """A model's shape with random weights in bfloat16: speed does not depend on their values."""
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).bfloat16().eval()
    return Policy(model, None, [NEVER], 0, f"{shape}-shape", 4096, torch.bfloat16)


def task_prompts(policy: Policy, count: int) -> list[list[int]]:
    """Prompts of the arithmetic task, which are all of one length."""
    task = make_task("arithmetic")
    return [task.encode(task.train[i], policy.tokenizer) for i in range(count)]


def generate(policy: Policy, prompts: list[list[int]], tokens: int, cache: str) -> None:
    ids = torch.tensor(prompts, device=policy.device)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=None if policy.eos_ids == [NEVER] else policy.eos_ids,
        pad_token_id=policy.pad_id,
        cache_implementation=cache,
        use_cache=True,
    )
    out = policy.model.generate(ids, attention_mask=ids * 0 + 1, generation_config=settings)
    full = len(prompts[0]) + tokens
    assert out.shape[1] == full or policy.eos_ids != [NEVER], out.shape


@torch.inference_mode()
def bare_kernels(
    policy: Policy, rows: int, tokens: int, length: int, *, products_only: bool
) -> None:
    """What decoding cannot do without: the products of every step, attention, the activation."""
    config, like = policy.bare.config, {"device": policy.device, "dtype": policy.dtype}
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    dim, inner = config.hidden_size, config.intermediate_size
    shapes = [(dim, (heads + 2 * kv) * width), (heads * width, dim), (dim, 2 * inner), (inner, dim)]
    weights = [torch.randn(shape, **like) for shape in shapes] * config.num_hidden_layers
    weights.append(torch.randn(dim, config.vocab_size, **like))
    inputs = {n: torch.randn(rows, n, **like) for n in {dim, heads * width, inner}}
    query = torch.randn(rows, kv, heads // kv, width, **like)
    cache = torch.randn(config.num_hidden_layers, 2, rows, kv, length + tokens, width, **like)
    gate = torch.randn(rows, inner, **like)
    for step in range(tokens):
        for weight in weights:
            torch.mm(inputs[weight.shape[0]], weight)
        for keys, values in cache[:, :, :, :, : length + step] if not products_only else ():
            scaled_dot_product_attention(query, keys, values)
            silu(gate)


def seconds(work: Callable[[], object]) -> float:
    start = synchronised()
    work()
    return synchronised() - start


def rates(runs: dict[str, Callable[[], object]], tokens: int, repeats: int) -> dict[str, float]:
    """Tokens per second: the median of several turns, after one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, work in runs.items():
            taken[name].append(seconds(work))
    return {name: tokens / statistics.median(times[1:]) for name, times in taken.items()}


def step_profile(work: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel; `host` is the time between kernels."""
    profile = kernel_profile(work)
    parts = profile["kinds_ms"] | {"host": profile["gaps_ms"]}
    return {part: round(ms / steps, 3) for part, ms in parts.items()}


class Case:
    """Prompts of one number of rows, and what was measured on them so far."""

    def __init__(self, args: argparse.Namespace, policy: Policy, rows: int) -> None:
        large = policy.device.type == "cuda"
        self.policy, self.rows, self.samples = policy, rows, args.samples
        self.tokens = args.tokens or (256 if large else 6 if args.task else 32)
        self.length = args.prompt or (64 if large else 8)
        self.file = Path(args.json.format(rows=rows)) if args.json else None
        count = -(-rows // args.samples)
        draw = torch.Generator().manual_seed(0)
        self.distinct = torch.randint(4, 100, (count, self.length), generator=draw).tolist()
        if args.task:
            self.distinct = task_prompts(policy, count)
        self.prompts = [prompt for prompt in self.distinct for _ in range(args.samples)][:rows]
        self.result: dict[str, Any] = {"rates": {}}
        print(
            f"\n{policy.name} on {device_name(policy)}, {rows} rows x {self.tokens} tokens,", end=""
        )
        print(f" prompts of {len(self.prompts[0])}", flush=True)

    def sample(self, sampler: Any, tokens: int | None = None) -> Any:
        return sampler.sample(
            self.prompts,
            seeds=list(range(self.rows)),
            max_tokens=tokens or self.tokens,
            temperature=1.0,
        )

    def note(self, rates: dict[str, float] | None = None, **more: Any) -> None:
        """Prints and keeps results."""
        for name, value in (rates or {}).items():
            print(f"{name:28s}{value:12,.0f} tok/s", flush=True)
        for name, value in more.items():
            print(f"{name:28s}{value}", flush=True)
        self.result["rates"] |= rates or {}
        self.result |= more
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.result, indent=1) + "\n")

    def measure(self, args: argparse.Namespace) -> None:
        policy, tokens, large = self.policy, self.tokens, self.policy.device.type == "cuda"
        sampler: Any = None

        def first() -> None:
            nonlocal sampler
            sampler = make_sampler("local", policy, max_rows=max(512, self.rows))
            self.sample(sampler, 1)

        self.note(first_token=round(seconds(first), 3))
        runs: dict[str, Callable[[], object]] = {"local": lambda: self.sample(sampler)}
        repeats = args.repeats or (3 if large else 7)
        if large:
            self.note(rates(runs, self.rows * tokens, repeats))
            self.note(profile_ms=step_profile(lambda: self.sample(sampler, 64), 64))
            runs = {}
        few = min(tokens, 32) if large else tokens
        caches = ["dynamic", "static"][: 1 + args.static] if "generate" not in args.skip else []
        for cache in caches:
            runs[f"generate ({cache} cache)"] = partial(generate, policy, self.prompts, few, cache)
        self.note(rates(runs, self.rows * few, 1 if large else repeats))
        if not args.task and "kernels" not in args.skip:
            bounds = (("products alone", True), ("with attention, activation", False))
            work = {
                name: partial(
                    bare_kernels, policy, self.rows, tokens, self.length, products_only=only
                )
                for name, only in bounds
            }
            self.note(rates(work, self.rows * tokens, 1))
        gap = agreement(policy, sampler, self.distinct[:16], max_tokens=tokens)
        self.note(gap=gap._asdict())
        if large:
            self.note(peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))
        sampler.close()

    def measure_vllm(self, sampler: Any) -> None:
        self.note(rates({"vllm": lambda: self.sample(sampler)}, self.rows * self.tokens, 2))


def device_name(policy: Policy) -> str:
    return torch.cuda.get_device_name() if policy.device.type == "cuda" else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="on a GPU")
    parser.add_argument("--rows", type=int, nargs="+", help="256, or 128 and 512 on a GPU")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--samples", type=int, default=8, help="rows that share a prompt")
    parser.add_argument("--repeats", type=int, help="runs that count: 7, or 3 on a GPU")
    parser.add_argument("--task", action="store_true", help="as the quickstart draws them")
    parser.add_argument("--static", action="store_true", help="also time generate's static cache")
    parser.add_argument("--skip", nargs="+", choices=["generate", "kernels", "vllm"], default=[])
    parser.add_argument("--json", help="a file for each number of rows; {rows} stands for it")
    args = parser.parse_args()
    device = torch.device(args.device)
    large = device.type == "cuda"
    policy = large_policy(args.shape, device) if large else load_policy("tiny")
    if not args.task:
        policy = replace(policy, eos_ids=[NEVER])
        policy.model.generation_config.eos_token_id = None
    rows = args.rows or ([128, 512] if large else [256])
    cases = []
    for number in rows:
        cases.append(Case(args, policy, number))
        cases[-1].measure(args)
        if large:
            torch.cuda.empty_cache()
    if large and "vllm" not in args.skip and importlib.util.find_spec("vllm"):
        print("\nvLLM", flush=True)
        sampler = make_sampler("vllm", policy, max_rows=max(rows), max_length=1024, memory=0.4)
        for case in cases:
            case.measure_vllm(sampler)
    for case in cases:
        print(json.dumps(case.result))


if __name__ == "__main__":
    main()
