"""Simulates what a step sends over 8 to 1,024 data-parallel ranks: gradients, and ISOPO's share.

    python benchmarks/rank_traffic.py --json docs/results/engines/rank-traffic.json \
        --figure docs/results/engines/rank-traffic.svg

A ring all-reduce of S bytes over N ranks takes 2 (N - 1) rounds; in each, every rank waits for its
left neighbour and passes on S / N bytes. A message over a link takes latency + bytes / bandwidth,
the latency lengthened by exponential noise. Nodes hold 8 ranks in a row, so that one link in 8
crosses the network. Nothing overlaps with computing, and rings are all that is modelled: both make
the figures upper bounds of what a tree or an overlapped reduction would take.

    gradients     bfloat16, one reduction a step: every method, ISOPO too
    ISOPO         one sum a step for trailing averages: 2 K + 1 float64 for K layers' weights
    ISOPO, cut    sequences cut over the 8 ranks of a node (Ulysses): for a layer O x D the rows of
                  M overlap positions, M (O + D), and M m inner products; bfloat16 and float32; for
                  each micro-batch of m sequences
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8
MODELS = {
    "Qwen3-0.6B": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        "tie_word_embeddings": False,
    },
}
OVERLAP, SEQUENCES, MICROBATCHES = 64, 8, 8
REPEATS = 5


@dataclass(frozen=True)
class Network:
    """Links inside a node and between nodes: bytes per second and seconds, noise as a share.

    The defaults are an HGX H100 node with one 400 Gb/s port for each GPU, at 80 % of its rate.
    """

    inside_bandwidth: float = 360e9
    between_bandwidth: float = 40e9
    inside_latency: float = 3e-6
    between_latency: float = 8e-6
    noise: float = 0.2


def ring_seconds(size: float, ranks: int, network: Network, draws: np.random.Generator) -> float:
    """Seconds of a ring all-reduce of `size` bytes, by the clocks of its ranks."""
    crosses = np.arange(ranks) % NODE == 0 if ranks > NODE else np.zeros(ranks, dtype=bool)
    latency = np.where(crosses, network.between_latency, network.inside_latency)
    bandwidth = np.where(crosses, network.between_bandwidth, network.inside_bandwidth)
    transfer = size / ranks / bandwidth
    clock = np.zeros(ranks)
    for _ in range(2 * (ranks - 1)):
        late = draws.exponential(network.noise, ranks) if network.noise else 0.0
        clock = np.maximum(clock, np.roll(clock, 1)) + latency * (1 + late) + transfer
    return float(clock.max())


def shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the trained tensors of a Qwen3 model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, **config))
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def cut_messages(name: str, shape: tuple[int, ...]) -> list[float]:
    """Bytes of the two sums for F of one tensor in a micro-batch: rows, then inner products."""
    rows = shape[1] + 1 if "embed_tokens" in name else sum(shape)
    return [2.0 * OVERLAP * rows, 4.0 * OVERLAP * SEQUENCES]


def traffic(model: str) -> dict[str, list[float]]:
    """Bytes of the messages of a step, by purpose; a tied head is a second use of its weight."""
    trained = tensors = shapes(MODELS[model])
    if MODELS[model]["tie_word_embeddings"]:
        tensors = [*trained, ("lm_head.weight", dict(trained)["model.embed_tokens.weight"])]
    return {
        "gradients": [2.0 * sum(math.prod(shape) for _, shape in trained)],
        "ISOPO": [8.0 * (2 * len(tensors) + 1)],
        "ISOPO, cut": [size for tensor in tensors for size in cut_messages(*tensor)] * MICROBATCHES,
    }


def simulated(model: str, network: Network) -> dict[str, Any]:
    """Bytes of a step, and its milliseconds for each number of ranks: medians of repetitions."""
    sent, draws = traffic(model), np.random.default_rng(0)

    def seconds(purpose: str, ranks: int) -> float:
        runs = 1 if len(sent[purpose]) > 1 else REPEATS
        rings = [
            [ring_seconds(size, ranks, network, draws) for size in sent[purpose]]
            for _ in range(runs)
        ]
        return 1e3 * float(np.median([sum(ring) for ring in rings]))

    times = {p: [round(seconds(p, n), 4) for n in RANKS] for p in ("gradients", "ISOPO")}
    times["ISOPO, cut"] = [round(seconds("ISOPO, cut", NODE), 4)] * len(RANKS)  # inside a node
    return {
        "bytes": {purpose: sum(messages) for purpose, messages in sent.items()},
        "messages": {purpose: len(messages) for purpose, messages in sent.items()},
        "ms": times,
    }


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws milliseconds over ranks, a panel for each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "proxpo"
    from matplotlib import pyplot

    made, panels = pyplot.subplots(1, len(MODELS), figsize=(9, 3.4), sharey=True)
    for panel, model in zip(panels, MODELS):
        for purpose, times in figures["models"][model]["ms"].items():
            panel.loglog(RANKS, times, marker="o", markersize=3, label=purpose)
        panel.set(title=model, xlabel="ranks", xticks=RANKS, xticklabels=map(str, RANKS))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds a step")
    panels[0].legend(frameon=False)
    made.tight_layout()
    made.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    for name, value in asdict(Network()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    options = vars(parser.parse_args())
    network = Network(**{name: options[name] for name in asdict(Network())})
    figures = {
        "network": asdict(network),
        "node": NODE,
        "ranks": RANKS,
        "overlap": OVERLAP,
        "sequences": SEQUENCES,
        "microbatches": MICROBATCHES,
        "models": {model: simulated(model, network) for model in MODELS},
    }
    for model, row in figures["models"].items():
        for purpose, times in row["ms"].items():
            size = row["bytes"][purpose] / row["messages"][purpose]
            print(f"{model:11} {purpose:11} {row['messages'][purpose]:5} x {size:14,.0f} B", *times)
    for path in filter(None, (options["json"], options["figure"])):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options["json"]:
        options["json"].write_text(json.dumps(figures, indent=1) + "\n")
    if options["figure"]:
        draw(figures, options["figure"])


if __name__ == "__main__":
    main()
