"""Tokens per second of the local sampler against `transformers.generate`, in one run.

    python benchmarks/rollout_speed.py                  # the tiny model, 256 rows, CPU
    python benchmarks/rollout_speed.py --task           # the same as the quickstart draws them
    python benchmarks/rollout_speed.py --device cuda    # Qwen3-0.6B's shape, 128 x 256, bfloat16

Every row runs to the full length (no end-of-sequence token), so that both produce the same number
of tokens; prompts are shared by `--samples` rows. With --task the prompts are those of the
arithmetic task, responses end where the model ends them or after 6 tokens, and both samplers stop
when all have ended: what a training step waits for. The samplers take turns and the median counts.
Two more rates are taken in the same run: the matrix products of decoding alone, and these with the
attention and the activation, one kernel each. A sampler of this model in this precision cannot be
faster than its kernels, so their rate divided by that of `generate` bounds what can be gained. The
gap of the sampled tokens' log-probabilities to a full forward pass is printed with the rates.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from proxpo.models import Policy, load_policy
from proxpo.sampler import agreement, make_sampler
from proxpo.train.tasks import make_task

NEVER = -1  # a token id that does not occur


def large_policy(device: torch.device) -> Policy:
    """Qwen3-0.6B's shape with random weights in bfloat16: speed does not depend on their values."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).bfloat16().eval()
    return Policy(model, None, [NEVER], 0, "qwen3-0.6b-shape", 4096, torch.bfloat16)


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
def kernels(policy: Policy, rows: int, tokens: int, length: int, *, products_only: bool) -> None:
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


def rates(runs: dict[str, Callable[[], object]], tokens: int, repeats: int) -> dict[str, float]:
    """Tokens per second: the median of several turns, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: tokens / statistics.median(taken[1:]) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--samples", type=int, default=8, help="rows that share a prompt")
    parser.add_argument("--repeats", type=int, help="turns that count: 7, or 2 on a GPU")
    parser.add_argument("--task", action="store_true", help="as the quickstart draws them")
    parser.add_argument("--static", action="store_true", help="also time generate's static cache")
    args = parser.parse_args()
    device = torch.device(args.device)
    large = device.type == "cuda"
    rows = args.rows or (128 if large else 256)
    tokens = args.tokens or (256 if large else 6 if args.task else 32)
    length = args.prompt or (64 if large else 8)
    policy = large_policy(device) if large else load_policy("tiny")
    if not args.task:
        policy = replace(policy, eos_ids=[NEVER])

    draw = torch.Generator().manual_seed(0)
    count = -(-rows // args.samples)
    distinct = torch.randint(4, 100, (count, length), generator=draw).tolist()
    if args.task:
        distinct = task_prompts(policy, count)
    prompts = [prompt for prompt in distinct for _ in range(args.samples)][:rows]
    seeds = list(range(rows))
    rollout = make_sampler("local", policy)
    options = {"seeds": seeds, "max_tokens": tokens, "temperature": 1.0}
    runs: dict[str, Callable[[], object]] = {"local": lambda: rollout.sample(prompts, **options)}
    for cache in ["dynamic", "static"][: 1 + args.static]:
        runs[f"generate ({cache} cache)"] = partial(generate, policy, prompts, tokens, cache)
    bounds = () if args.task else (("products alone", True), ("with attention, activation", False))
    for name, only in bounds:
        runs[name] = partial(kernels, policy, rows, tokens, length, products_only=only)
    found = rates(runs, rows * tokens, args.repeats or (2 if large else 7))
    gap = agreement(policy, rollout, distinct[:16], max_tokens=tokens)
    print(f"{policy.name} on {device}, {rows} rows x {tokens} tokens, prompts of {length}")
    base = found["generate (dynamic cache)"]
    for name, value in found.items():
        print(f"{name:28s}{value:12,.0f} tok/s {value / base:7.2f}x generate")
    print(f"log-probs against a full forward: largest gap {gap.largest:.2e}, mean {gap.mean:.2e}")
    print(json.dumps({"rates": found, "gap": gap._asdict()}))


if __name__ == "__main__":
    main()
