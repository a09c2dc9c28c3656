"""How good is ISOPO's Fisher norm? Its estimate against the exact one, by length and overlap.

    python scripts/plot_overlap_error.py --out docs/isopo

For a transformer small enough to hold hundreds of sequence gradients, the script compares

    estimate  F̂_i² = Σ_{j∈J} ⟨V_i, G_j⟩² / Σ_{j∈J} |G_j|²      J positions of the micro-batch
    exact     F_i² = V_i · F V_i / tr F                        F = E[∇ log π ∇ log πᵀ], this layer

(F from hundreds of independent sequences) for sequences drawn from the policy itself. Two numbers
matter: the bias, a factor common to the sequences of a layer (AdamW and Muon remove it), and the
spread, how much log(F̂_i/F_i) varies between the sequences of one micro-batch (what the method
feels).
"""

import argparse
import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from toy_policy import ToyPolicy, response_logp, sample

from proxpo import gradients

VOCAB, WIDTH, LAYERS, ROWS = 16, 24, 2, 8
OVERLAPS: tuple[int | str, ...] = (16, 64, 250, "all", "sequences")
LENGTHS = (4, 8, 16, 32, 64, 128)
FIELDS = ("policy", "length", "overlap", "bias", "spread", "spread_p10", "spread_p90")


def patterns(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Random words of 2 to 5 tokens, repeated: text whose positions resemble each other."""
    period = torch.randint(2, 6, (rows, 1), generator=generator)
    words = torch.randint(VOCAB, (rows, 5), generator=generator)
    return words.gather(1, torch.arange(length).expand(rows, -1) % period)


def make_policy(kind: str, longest: int, seed: int) -> ToyPolicy:
    """`random`: as initialised; `repeating`: trained to continue repeated words."""
    torch.manual_seed(seed)
    model = ToyPolicy(VOCAB, width=WIDTH, layers=LAYERS, longest=longest)
    if kind == "random":
        return model
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        ids = patterns(32, min(longest, 48), generator)
        loss = -response_logp(model, ids, 1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def hidden_matrices(model: nn.Module) -> list[str]:
    return [
        name for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2
    ]


def layer_scores(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """V_i of every sequence and hidden matrix, (row, out · inp)."""
    matrices = {name: model.get_parameter(name).detach() for name in hidden_matrices(model)}

    def logp(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return response_logp(lambda x: functional_call(model, values, (x,)), one[None], 1).sum()

    found = vmap(grad(logp), in_dims=(None, 0), chunk_size=32)(matrices, ids)
    return {name: v.flatten(1) for name, v in found.items()}


def exact_norms(found: dict[str, Tensor], drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """√(V·FV / tr F) with F = E[s sᵀ] over independent sequences of the policy, scores `drawn`."""
    return {
        name: ((v @ drawn[name].T).square().mean(1) / drawn[name].square().sum(1).mean()).sqrt()
        for name, v in found.items()
    }


def estimates(model: nn.Module, ids: Tensor, overlap: int | str, seed: int) -> dict[str, Tensor]:
    """F̂_i of every hidden matrix, as the transform computes it.

    "sequences" is the direct estimate (the paper's eq. 2): whole sequences instead of positions.
    """
    found: dict[str, Tensor] = {}
    names = set(hidden_matrices(model))

    def observe(name: str, values: dict[str, Tensor]) -> None:
        if name not in names:
            return
        if overlap == "sequences":
            kernel = values["kernel"]
            found[name] = (kernel.square().sum(1) / kernel.trace()).sqrt()
        else:
            found[name] = values["F2"].sqrt()

    by_rows = overlap == "sequences"
    transform = gradients.isopo_ntk() if by_rows else gradients.isopo(overlap=overlap, seed=seed)
    index = torch.arange(len(ids))[:, None].expand(-1, ids.shape[1] - 1)
    ones = torch.ones(len(ids))
    with transform.applied(model, sequences=index, advantages=ones, observe=observe):
        (-response_logp(model, ids, 1).sum()).backward()
    model.zero_grad()
    return found


def compare(kind: str, model: nn.Module, drawn: Tensor, batches: list[Tensor]) -> Iterator[dict]:
    """One row of the table per overlap size; `drawn` are the sequences that define F."""
    reference = layer_scores(model, drawn)
    logs: dict[int | str, list[tuple[float, float]]] = {overlap: [] for overlap in OVERLAPS}
    for number, ids in enumerate(batches):
        exact = exact_norms(layer_scores(model, ids), reference)
        for overlap in OVERLAPS:
            for name, found in estimates(model, ids, overlap, number).items():
                log = (found / exact[name]).detach().log()
                logs[overlap].append((float(log.mean()), float(log.std())))
    for overlap, pairs in logs.items():
        bias, spread = (sorted(column) for column in zip(*pairs))
        tenth = len(spread) // 10
        yield {
            "policy": kind, "length": drawn.shape[1] - 1, "overlap": overlap,
            "bias": math.exp(statistics.median(bias)), "spread": statistics.median(spread),
            "spread_p10": spread[tenth], "spread_p90": spread[-1 - tenth],
        }  # fmt: skip


def measure(batches: int, sequences: int, seed: int) -> Iterator[dict]:
    """Both policies at all lengths: a prefix of a sample is a sample of the shorter length."""
    for kind in ("random", "repeating"):
        model = make_policy(kind, max(LENGTHS) + 1, seed)
        generator = torch.Generator().manual_seed(seed)
        first = patterns(sequences + ROWS * batches, 1, generator)
        ids = sample(model, first, max(LENGTHS), generator)
        for length in LENGTHS:
            short = ids[:, : length + 1]
            drawn, rest = short[:sequences], short[sequences:]
            yield from compare(kind, model, drawn, list(rest.split(ROWS)))


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["policy"] for row in rows))
    shades = ["#a6cee3", "#5aa5d6", "#2171b5", "#08306b"]
    styles = dict(zip(OVERLAPS, [{"color": c} for c in shades]))
    styles["sequences"] = {"color": "#d94801", "linestyle": "--"}
    figure, axes = plt.subplots(len(kinds), 2, figsize=(9.5, 3.6 * len(kinds)), sharex=True)
    for line, kind in zip(axes, kinds):
        for overlap in OVERLAPS:
            mine = [r for r in rows if r["policy"] == kind and str(r["overlap"]) == str(overlap)]
            x = [int(r["length"]) for r in mine]
            label = {"all": "every position", "sequences": "8 whole sequences (eq. 2)"}.get(
                str(overlap), f"{overlap} positions"
            )
            for axis, key in zip(line, ("bias", "spread")):
                y = [float(r[key]) for r in mine]
                axis.plot(x, y, marker="o", markersize=4, label=label, **styles[overlap])
            if overlap == 64:
                low, high = ([float(r[k]) for r in mine] for k in ("spread_p10", "spread_p90"))
                line[1].fill_between(x, low, high, color=styles[64]["color"], alpha=0.2, lw=0)
        line[0].axhline(1.0, color="0.6", lw=0.8, zorder=0)
        line[0].set_ylabel(f"{kind} policy")
        line[0].set_ylim(bottom=0)
        line[1].set_ylim(bottom=0)
        for axis in line:
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_title("bias: estimated / exact Fisher norm", fontsize=11)
    axes[0][1].set_title("spread of log(estimated / exact) in a micro-batch", fontsize=11)
    for axis in axes[-1]:
        axis.set_xlabel("tokens per sequence")
        axis.set_xticks(list(LENGTHS), [str(n) for n in LENGTHS])
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(lines, labels, loc="lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/isopo"))
    parser.add_argument("--batches", type=int, default=6, help="micro-batches per point")
    parser.add_argument("--sequences", type=int, default=384, help="samples that define F")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replot", action="store_true", help="draw from the CSV again")
    options = parser.parse_args()
    table = options.out / "overlap_error.csv"
    if options.replot:
        with table.open() as file:
            rows = list(csv.DictReader(file))
    else:
        rows = []
        for row in measure(options.batches, options.sequences, options.seed):
            rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(*(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    plot(rows, options.out / "overlap_error.png")


if __name__ == "__main__":
    main()
