"""Tokens per second of the local sampler against `transformers.generate`, in one run.

    python benchmarks/rollout_speed.py                  # the tiny model, 256 rows, CPU
    python benchmarks/rollout_speed.py --device cuda    # Qwen3-0.6B's shape, 128 x 256, bfloat16

Every row runs to the full length (no end-of-sequence token), so that both produce the same number
of tokens; prompts are shared by `--samples` rows. The gap of the sampled tokens' log-probabilities
to a full forward pass is printed with the rates.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from proxpo.train.models import Policy, load_policy
from proxpo.train.rollouts import agreement, make_rollout

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


def generate(policy: Policy, prompts: list[list[int]], tokens: int, cache: str) -> None:
    ids = torch.tensor(prompts, device=policy.device)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=policy.pad_id,
        cache_implementation=cache,
        use_cache=True,
    )
    out = policy.model.generate(ids, attention_mask=ids * 0 + 1, generation_config=settings)
    assert out.shape == (len(prompts), len(prompts[0]) + tokens), out.shape


def rate(run: Callable[[], object], tokens: int, repeats: int) -> float:
    """Best of several, after one that warms up: tokens per second."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return tokens / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--samples", type=int, default=8, help="rows that share a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--static", action="store_true", help="also time generate's static cache")
    args = parser.parse_args()
    device = torch.device(args.device)
    large = device.type == "cuda"
    rows = args.rows or (128 if large else 256)
    tokens = args.tokens or (256 if large else 32)
    length = args.prompt or (64 if large else 8)
    policy = large_policy(device) if large else replace(load_policy("tiny"), eos_ids=[NEVER])

    draw = torch.Generator().manual_seed(0)
    distinct = torch.randint(4, 100, (-(-rows // args.samples), length), generator=draw).tolist()
    prompts = [prompt for prompt in distinct for _ in range(args.samples)][:rows]
    seeds = list(range(rows))
    rollout = make_rollout("local", policy)
    rates = {
        "local": rate(
            lambda: rollout.sample(prompts, seeds=seeds, max_tokens=tokens, temperature=1.0),
            rows * tokens,
            args.repeats,
        )
    }
    for cache in ["dynamic", "static"][: 1 + args.static]:
        rates[f"generate ({cache} cache)"] = rate(
            lambda cache=cache: generate(policy, prompts, tokens, cache),
            rows * tokens,
            args.repeats if not large else 1,
        )
    gap = agreement(policy, rollout, distinct[:16], max_tokens=tokens)
    print(f"{policy.name} on {device}, {rows} rows x {tokens} tokens, prompts of {length}")
    for name, value in rates.items():
        print(f"{name:28s}{value:12,.0f} tok/s   local is {rates['local'] / value:5.2f}x")
    print(f"log-probs against a full forward: largest gap {gap.largest:.2e}, mean {gap.mean:.2e}")
    print(json.dumps({"rates": rates, "gap": gap._asdict()}))


if __name__ == "__main__":
    main()
