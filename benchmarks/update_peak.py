"""The trainer's update of a model of some shape: milliseconds, share of the peak, profile.

    python benchmarks/update_peak.py --json update.json      Qwen3-0.6B's shape, 8 x 1024, on a GPU
    python benchmarks/update_peak.py --shape smollm2 --rows 512 --length 58 --prompt 46 \\
        --arms reinforce isopo isopo-ntk                     the shape of smollm2-arithmetic
    python benchmarks/update_peak.py --shape toy --rows 4 --length 32       a CPU

An arm is a method with settings of the trainer behind it; `plain` is forward and backward of the
model alone, weights in bfloat16, log-softmax over whole logits: `reinforce` of isopo_overhead.py.
An update is all that the trainer does with a rollout: preparation, forward, loss, backward, clip
and optimizer's step, for random tokens. The arms take turns; medians.

The share of the peak counts the products with the weights, 6 x tokens x (weights of linear layers
and head), against the dense bfloat16 rate of an H200; `with attention` adds
6 x layers x heads x head_dim x length^2 x rows, the lower triangle of attention.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from isopo_overhead import SMALL, TOY, WIDE, Case, build, run
from kernels import kernel_profile, lines
from record import Record, synchronised
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from proxpo.errors import ProxpoError
from proxpo.models import Policy
from proxpo.settings import at_length
from proxpo.train import language
from proxpo.train.config import Config, load_config
from proxpo.train.experience import Experience
from proxpo.train.scoring import Learner
from proxpo.train.update import update
from proxpo.types import Clock

PEAK = 989e12  # dense bfloat16 operations a second of an H200
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": (Qwen3Config, SMALL),
    "wide": (Qwen3Config, WIDE),
    "smollm2": (LlamaConfig, SMOLLM2),
    "toy": (LlamaConfig, TOY),
}
NEVER = -1  # a token id that does not occur


def operations(shape: dict[str, Any], rows: int, length: int) -> tuple[float, float]:
    """Operations of forward and backward in products with weights, and in attention."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * heads + 2 * kv + 3 * shape["intermediate_size"])
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    attention = 6.0 * shape["num_hidden_layers"] * heads * length**2 * rows
    return 6.0 * rows * length * weights, attention


def rollout(shape: dict[str, Any], args: argparse.Namespace, device: str) -> Experience:
    """Random prompts and responses of full length; every second response is right."""
    rows, prompt = args.rows, args.prompt
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape["vocab_size"], (rows, args.length), generator=draw)
    group = torch.arange(rows) // args.samples
    ids[:, :prompt] = ids[group * args.samples, :prompt]
    mask = torch.ones(rows, args.length - prompt, dtype=torch.bool)
    return Experience(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        mask=mask,
        rollout_logp=torch.full(mask.shape, -5.0),
        rewards=(torch.arange(rows) % 2).float(),
        truncated=torch.zeros(rows, dtype=torch.bool),
        group=group,
        version=torch.zeros(rows, dtype=torch.long),
    ).to(device)


@dataclass
class Updater:
    """The part of a run that makes updates."""

    config: Config
    learner: Learner
    step: int = 0
    skipped: int = 0
    past: list[Experience] = field(default_factory=list)

    @property
    def most_parts(self) -> int:
        """Mini-batches that a rollout can be cut into."""
        return self.config.rollout.prompts_per_step

    @property
    def clock(self) -> Clock:
        rate = self.learner.optimizer.param_groups[0]["lr"]
        return Clock(steps=self.config.train.steps, learning_rate=float(rate))


def trainer(arm: str, args: argparse.Namespace, device: str) -> Updater:
    """The updates of an arm, with a model of random weights."""
    make, shape = SHAPES[args.shape]
    method, *sets = arm.split()
    sizes = [
        f"prompts_per_step={args.rows // args.samples}", f"samples_per_prompt={args.samples}",
        f"max_tokens={args.length - args.prompt}", "micro_batch=auto", "lr=1e-6",
    ]  # fmt: skip
    config = load_config(None, [f"method={method}", *sizes, *sets])
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(make(**shape), dtype=torch.float32).eval()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = Policy(model, None, [NEVER], 0, args.shape, 8192, dtype)
    recipe = at_length(config.make_recipe(), config.rollout.max_tokens)
    longest = config.rollout.max_tokens
    return Updater(config, language._learner(config, policy, recipe, model, longest=longest))


def work_of(arm: str, args: argparse.Namespace, device: str) -> Callable[[], object]:
    """The work of an arm, to be timed."""
    _, shape = SHAPES[args.shape]
    if arm == "plain":
        model = build(Case(args.shape, shape, args.rows, args.length), device)
        ids = torch.randint(0, shape["vocab_size"], (args.rows, args.length), device=device)
        seq = torch.arange(args.rows, device=device)[:, None].expand(args.rows, args.length)
        advantages = torch.randn(args.rows, device=device)

        def plain() -> None:
            model.zero_grad(set_to_none=True)
            run(model, None, ids, seq, advantages)

        return plain
    job, experience = trainer(arm, args, device), rollout(shape, args, device)
    job.learner.budget.on_notice = print
    return lambda: update(job, experience)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b" if gpu else "toy")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="prompt and response, in tokens")
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="responses to a prompt")
    graphs = ["reinforce train.graphs=on"] if gpu else []
    parser.add_argument(
        "--arms", nargs="+", default=["plain", "reinforce train.graphs=off", *graphs]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    record = Record(args.json)
    products, attention = operations(SHAPES[args.shape][1], args.rows, args.length)
    times: dict[str, list[float]] = {}
    works: dict[str, Callable[[], object]] = {}
    peaks: dict[str, float] = {}
    for arm in args.arms:
        try:
            works[arm] = work_of(arm, args, device)
        except ProxpoError as error:
            print(f"{arm}: {error}")
            continue
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if gpu else 0  # the weights of the arms before
        for _ in range(3):  # shapes are recorded when they come again
            works[arm]()
        peaks[arm] = (torch.cuda.max_memory_allocated() - held) / 2**30 if gpu else 0.0
        print(f"{arm}: ready", flush=True)
    for _ in range(args.repeats):
        for arm, work in works.items():
            start = synchronised()
            work()
            times.setdefault(arm, []).append(synchronised() - start)
    for arm, seconds in times.items():
        median = statistics.median(seconds)
        entry: dict[str, Any] = {
            "ms": 1e3 * median,
            "percent": 100 * products / median / PEAK,
            "percent_with_attention": 100 * (products + attention) / median / PEAK,
            "peak_gib": peaks[arm],
            "all_ms": [1e3 * x for x in seconds],
        }
        print(
            f"{arm:<36}{entry['ms']:9.1f} ms {entry['percent']:6.2f} % of the peak "
            f"({entry['percent_with_attention']:.2f} % with attention) "
            f"{entry['peak_gib']:6.2f} GiB beside the weights",
            flush=True,
        )
        name = f"{args.shape} {args.rows}x{args.length}/{arm}"
        record.add(name, entry)
        if gpu:
            start = time.perf_counter()
            entry["profile"] = kernel_profile(works[arm])
            print(lines(entry["profile"]), f"  traced in {time.perf_counter() - start:.1f} s")
            record.add(name, entry)


if __name__ == "__main__":
    main()
