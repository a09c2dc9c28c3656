"""docs/engines.md: which method runs in which engine, from the refusals of the adapters.

GPU results come from docs/results/engines/trl-vllm.json and verl.json, entries "task/method" or
"task/method/variant" of benchmarks/engines_trl.py and engines_verl.py, and from backends.json of
benchmarks/gpu_step.py; the traffic of many ranks from rank-traffic.json.
"""

import functools
import json
import math
import re
import statistics
import textwrap
import warnings
from pathlib import Path
from typing import Any

from speed_pages import load, table
from trl import GRPOConfig

from proxpo.adapters.trl._refusals import check_recipe
from proxpo.adapters.verl._recipes import loss_refusal
from proxpo.adapters.versions import TESTED
from proxpo.errors import ProxpoError
from proxpo.recipes import methods
from proxpo.settings import make_recipe
from proxpo.stages.schedule import variants

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results/engines"
RUNS = "runs"
TIMES = ("step", "rollout", "update", "sync")


def page() -> str:
    """Text of docs/engines.md."""
    rows, reasons = [], {}
    for slug in methods("language"):
        cells = {"TRL": in_trl(slug), "verl": in_verl(slug)}
        for engine, cell in cells.items():
            if cell.startswith("refused: "):
                reasons.setdefault((engine, cell.removeprefix("refused: ")), []).append(slug)
                cells[engine] = "refused"
        rows.append(f"| `{slug}` | {cells['TRL']} | {cells['verl']} | {on_gpu(slug)} |")
    why = [
        f"| {engine} | {reason} | {', '.join(f'`{slug}`' for slug in slugs)} |"
        for (engine, reason), slugs in sorted(reasons.items())
    ]
    methods_table, refusals = "\n".join(rows), "\n".join(why)
    tested = "\n".join(f"| {env} | `{env.command}` |" for env in TESTED)
    return f"""# Engines

A method is a recipe; an engine samples responses, scores them and updates the model. In proxpo's
own trainer and in a loop of your own ([examples](../examples/README.md): plain PyTorch, Accelerate,
Lightning, `transformers.Trainer`) a method runs wherever the batch fields that it reads are there.
TRL and verl make rollouts and updates themselves. There a method is refused, in one line, if it
reads a field that they do not provide or decides what they decide.

| method | TRL: `ProxpoTrainer` | verl: `proxpo_...` | measured on a GPU |
| --- | --- | --- | --- |
{methods_table}

The first two columns are what the adapters decide at their defaults; the tests train every method
that runs (`tests/adapters/trl/test_trl_recipes.py`, `tests/adapters/verl`), on a CPU. *Engine*:
runs under `VERL_ENGINE_VENDOR=proxpo`, see [examples/verl](../examples/verl/README.md). *Redrawn*:
these methods replace prompts whose responses are all right or all wrong, which TRL does not.
Measurements: [below](#on-a-gpu).

| engine | reason of a refusal | methods |
| --- | --- | --- |
{refusals}

Arguments of TRL: [trl-arguments.md](trl-arguments.md). `proxpo doctor` tries the engines that are
installed.

{measured()}
## Versions

| tested together | command |
| --- | --- |
{tested}

TRL 1.15 computes log-probabilities in a Triton kernel and does not train without a GPU; its tests
ran in Triton's interpreter.

{several_nodes()}"""


@functools.cache  # asked for by several pages
def in_trl(slug: str) -> str:
    """ "runs", with the options or the sampler that it takes, or the reason of the refusal."""
    first = ""
    for options in ({}, {"schedule": None}, {"schedule.ratio": 0}):
        for samples in (False, True):
            try:
                recipe = make_recipe(slug, options)
                passes = len(variants(recipe) or (recipe,))
                args = GRPOConfig("unused", use_cpu=True, bf16=False, num_iterations=passes)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check_recipe(recipe, args, reports_logp=samples)
            except ProxpoError as error:
                first = first or str(error).removeprefix(f"recipe {slug}").removeprefix(": ")
                continue
            needs = ["vLLM or a `rollout_func`"] if samples else []
            needs += [f"`{options}`"] if options else []
            needs += [f"`num_iterations={passes}`"] if passes > 1 else []
            redrawn = "; prompts are not redrawn" if recipe.prompts else ""
            return (f"{RUNS} with {', '.join(needs)}" if needs else RUNS) + redrawn
    return f"refused: {first.strip()}"


def in_verl(slug: str) -> str:
    """ "runs", "engine" where proxpo's engine is needed, or the reason of the refusal."""
    recipe = make_recipe(slug)
    if not loss_refusal(recipe, engine=False):
        return RUNS
    reason = loss_refusal(recipe, engine=True)
    if not reason:
        return "engine"
    reason = reason.removeprefix(f"verl: {slug}").removeprefix(":").strip()
    return "refused: " + re.sub(r"('[a-z_]+') [(].*?[)](, which)", r"\1\2", reason)


def on_gpu(slug: str) -> str:
    """Engines in which this method was measured on a GPU."""
    files = {"TRL": "trl-vllm.json", "verl": "verl.json"}
    return ", ".join(
        engine
        for engine, file in files.items()
        if any(name.split("/")[1].split()[0] == slug for name in entries(file))
    )


def entries(file: str) -> dict[str, Any]:
    """Runs of a file of results by name; none where it is missing."""
    return (load(RESULTS / file) or {"entries": {}})["entries"]


def measured() -> str:
    """Steps on a GPU: TRL with vLLM, verl, and the trainer with either sampler."""
    return f"""## On a GPU

### TRL with vLLM

One H200, SmolLM2-135M in bf16: `ProxpoTrainer` beside TRL's own GRPO, with vLLM in the same process
and importance-sampling correction on. `arithmetic-chat` is sums: 20 steps of 64 x 8 responses of at
most 12 tokens. The methods of a variant took turns in one process, a step each, so that a slow
minute of the machine is slow for all. Seconds are medians of the steps after the third; rewards are
means of the first five and of the last five steps.

| word | meaning |
| --- | --- |
| `plain` | TRL's own passes, `graphs="off"` |
| `graphs` | recorded passes, the default of `ProxpoTrainer`; their memory is held between steps |
| `checkpointing` | gradient checkpointing |
| `lora` | rank 16, ten times the learning rate, without turns: differences below 1.25x say little |
| gap | mean difference of log-probabilities between sampler and trainer at the first step |
| memory | peak of a step above what is held between steps, measured recordings included |

With recorded passes every method that was measured is faster than TRL's GRPO. Without them, and
with gradient checkpointing, ISOPO misses our goal of 1.10x and ISOPO-NTK misses it by more: the
host needs long to launch their many small kernels. `dapo` penalises responses of more than ten
tokens (four fifths of the limit), where right answers end: it learns to be short, not to add
(`lora`); with `overlong=off` it learns to add.

On GSM8K (16 x 8 responses of at most 256 tokens) this model needs a warm start, so those rows show
time and memory alone. TRL's GRPO ran by itself there, ten steps in the same hour: its pass of 48
GiB did not fit beside the recordings of the others. ISOPO took 2.25 s a step in this run and 2.03 s
in another, so the ratios are good to a tenth.

{table(("run", "seconds a step", "over TRL", "reward", "gap", "memory"), trl_rows())}
![Rewards in TRL with vLLM](results/engines/trl-vllm.svg)

### proxpo's trainer with vLLM

GSM8K, 16 x 8 responses of at most 256 tokens, with either sampler (`rollout.backend`; `auto` takes
the local one for models that it knows). vLLM receives the weights after every update (`sync`): the
gap does not grow.

{table(("run", *TIMES, "gap, first and last", "peak"), backends())}
### verl with vLLM

verl's `main_ppo`, GSM8K, 16 x 8 responses of at most 256 tokens, ten steps; medians of the steps
after the second, rewards of the first and the last step, peak memory of the actor. The first four
rows ran at once on one card: their ratios compare, their seconds are longer than those of a run
alone (last row). Runs of verl that share a machine need a `/tmp` each
([why](../examples/verl/README.md)).

{table(("run", "seconds a step", "over vanilla", "update", "memory", "reward"), verl_rows())}"""


def trl_rows() -> list[tuple[str, ...]]:
    rows = []
    for name, entry in entries("trl-vllm.json").items():
        if "error" in entry or not entry["steps"]:
            continue
        rewards = [step["reward"] for step in entry["steps"]]
        first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
        relative = f"{entry.get('relative', 1):.2f}x"
        gib = entry["gib"] + entry.get("recorded_gib", 0)
        memory = "held" if gib < 1 else f"{gib:.0f} GiB"
        rows.append(
            (name.replace("/", ", "), f"{entry['median_s']:.2f}", relative,
             f"{first:.2f} to {last:.2f}", f"{entry['steps'][0]['gap']:.3f}", memory)
        )  # fmt: skip
    return rows


def backends() -> list[tuple[str, ...]]:
    rows = []
    for name, entry in entries("backends.json").items():
        steps = entry["steps"]
        times = [statistics.median(step[k] for step in steps) for k in TIMES]
        gaps = [step["gap"] for step in (*entry["warm_up"], *steps) if "gap" in step]
        gap = f"{gaps[0]:.3f}, {gaps[-1]:.3f}" if gaps else ""
        arm = name.split("/")[1]
        rows.append(
            (f"`{arm}`", *(f"{t:.2f} s" for t in times), gap, f"{entry['peak_gib']:.0f} GiB")
        )
    return rows


def verl_rows() -> list[tuple[str, ...]]:
    rows = []
    for name, entry in entries("verl.json").items():
        if "error" in entry:
            rows.append((name.replace("/", ", "), "failed", *[""] * 4))
            continue
        steps = entry["steps"]
        update = statistics.median(step["update_s"] for step in steps[2:])
        gib = max(step.get("allocated_gib", math.nan) for step in steps)
        relative = f"{entry['relative']:.2f}x" if "relative" in entry else ""
        rows.append(
            (name.replace("/", ", "), f"{entry['median_s']:.2f}", relative,
             f"{update:.2f} s", "" if math.isnan(gib) else f"{gib:.0f} GiB",
             f"{steps[0]['reward']:.3f} to {steps[-1]['reward']:.3f}")
        )  # fmt: skip
    return rows


def several_nodes() -> str:
    """The traffic of a step over many ranks, in words and as a figure."""
    figures = json.loads((RESULTS / "rank-traffic.json").read_text())
    network, ranks = figures["network"], figures["ranks"]
    small, large = figures["models"].values()
    names = list(figures["models"])

    def row(name: str, model: dict[str, Any]) -> str:
        cells = []
        for purpose in ("gradients", "ISOPO", "ISOPO, cut"):
            first, last = model["ms"][purpose][0], model["ms"][purpose][-1]
            times = f"{first:.3g} ms" if first == last else f"{first:.3g} to {last:.3g} ms"
            count = model["messages"][purpose]
            several = f" in {count:,} messages" if count > 1 else ""
            cells.append(f"{in_units(model['bytes'][purpose])}{several}: {times}")
        return f"| {name} | {' | '.join(cells)} |"

    text = f"""[slurm.sh](../examples/verl/slurm.sh) and
        [skypilot.yaml](../examples/verl/skypilot.yaml) start Ray on the nodes of a job and verl on
        top of it. Over data-parallel ranks ISOPO sends one message more than other methods:
        sums and counts of its trailing averages, 2 K + 1 float64 for K weights, once a step.
        Sequences that are cut over ranks (Ulysses) cost two sums for each weight and micro-batch,
        inside their node and whatever the number of ranks
        ([the arithmetic](isopo/sequence_parallel.md)).
        `benchmarks/rank_traffic.py` simulates ring all-reduces over {ranks[0]} to {ranks[-1]:,}
        ranks, {figures["node"]} in a node, at {network["inside_bandwidth"] / 1e9:.0f} GB/s and
        {1e6 * network["inside_latency"]:.0f} µs inside, {network["between_bandwidth"] / 1e9:.0f}
        GB/s and {1e6 * network["between_latency"]:.0f} µs between nodes, nothing overlapped; M =
        {figures["overlap"]}, {figures["microbatches"]} micro-batches of {figures["sequences"]}
        sequences:"""
    return f"""## Several nodes

{textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)}

| model | gradients, every method | ISOPO | ISOPO, sequences cut over 8 ranks |
| --- | --- | --- | --- |
{row(names[0], small)}
{row(names[1], large)}

![milliseconds a step over ranks](results/engines/rank-traffic.svg)

ISOPO's message costs latency alone: its time grows with the number of ranks, not with its bytes,
and with a tree in place of a ring it would grow with their logarithm. All of this is simulated;
nothing was measured on a network. """


def in_units(size: float) -> str:
    """Bytes in the unit that leaves one to three digits."""
    unit = min(int(math.log10(size)) // 3, 3)
    return f"{size / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


__all__ = ["page"]
