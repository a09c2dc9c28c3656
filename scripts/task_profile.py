"""Start of a model on a task: accuracy, response lengths, and the spread of gradient lengths.

    proxpo warmup gsm8k:FOLDER --model smollm2 --out runs/warm-gsm8k
    python scripts/task_profile.py gsm8k:FOLDER --model runs/warm-gsm8k --json profile.json

A rollout of `--prompts` x `--samples` responses at temperature 1 is weighed by ISOPO's lengths. For
response i and layer l: N = |V_il|, F as in proxpo/gradients/isopo.py. The spread of a length is the
ratio of its 90th to its 10th percentile over the responses of the rollout, 1 where all are equal;
the table gives its median over layers. `tokens` and `reward` are rank correlations of the layers'
mean log F (or N) with the length and the reward of a response.
"""

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxpo.gradients import Transform
from proxpo.gradients.diagnostics import Diagnostics, watch
from proxpo.logp import model_logp
from proxpo.ops.groups import group_stats
from proxpo.train.config import Config, load_config
from proxpo.train.cuts import Rows
from proxpo.train.experience import Experience
from proxpo.train.language import LanguageJob, build_language_job
from proxpo.train.observer import SILENT


def quantiles(x: Tensor) -> dict[str, float]:
    """Smallest value, deciles 1, 5 and 9, largest value."""
    places = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    values = x.double().cpu().quantile(places).tolist()
    return dict(zip(("min", "p10", "median", "p90", "max"), (round(v, 4) for v in values)))


def correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation; 0 where one of the two does not vary."""

    def ranks(z: Tensor) -> Tensor:
        _, place, size = z.unique(return_inverse=True, return_counts=True)
        return (size.cumsum(0) - (size - 1) / 2.0)[place]

    pair = torch.stack([ranks(x.double().cpu()), ranks(y.double().cpu())])
    value = float(pair.corrcoef()[0, 1])
    return round(value, 3) if value == value else 0.0


def relative_rewards(rows: Experience) -> Tensor:
    """GRPO's advantages of the responses."""
    stats = group_stats(rows.rewards, rows.group)
    return (rows.rewards - stats.mean) / (stats.std + 1e-6)


def cut_by_tokens(job: LanguageJob, rows: Experience) -> list[Tensor]:
    """Row numbers of each micro-batch."""
    return job.learner.budget.cut(Rows(rows.mask, rows.attention_mask))


def backward(
    job: LanguageJob,
    transform: Transform,
    rows: Experience,
    advantages: Tensor,
    *,
    measured: Diagnostics | None = None,
) -> None:
    """Adds the transform's gradient of the rollout; `measured` collects the lengths."""
    model = job.policy.model
    for part in cut_by_tokens(job, rows):
        cut = rows.rows(part)
        number = torch.arange(len(part), device=part.device)[:, None]
        block = transform.applied(
            model,
            sequences=torch.where(cut.attention_mask, number, -1),
            advantages=advantages[part],
            groups=cut.group,
        )
        with block as session, ExitStack() as stack:
            if measured is not None:
                stack.enter_context(watch(session, into=measured))
            with job.policy.autocast():
                logp = model_logp(model, cut.input_ids, cut.mask, attention_mask=cut.attention_mask)
            (-logp.sum()).backward()


def measure(job: LanguageJob, rows: Experience) -> Diagnostics:
    """Gradient lengths of every response, in the order of `cut_by_tokens`."""
    result, transform = Diagnostics(), job.learner.transform
    backward(job, transform, rows, relative_rewards(rows), measured=result)
    job.policy.model.zero_grad(set_to_none=True)
    transform.step(skipped=True)
    return result


def lengths(job: LanguageJob, rows: Experience) -> dict[str, Any]:
    """Spread of F and N over responses, and their relation to length and reward."""
    order = torch.cat(cut_by_tokens(job, rows))
    tokens, rewards = rows.mask.sum(dim=1)[order], rows.rewards[order]
    measured = measure(job, rows)
    entry: dict[str, Any] = {"cosine_reinforce": round(measured.cosine, 4), "layers": {}}
    for name, symbol in (("fisher", "F"), ("norm", "N")):
        layers = {layer: getattr(x, name).cpu() for layer, x in measured.layers.items()}
        decile = {k: x.quantile(x.new_tensor([0.1, 0.9])) for k, x in layers.items()}
        ratio = {k: float(x[1] / x[0].clamp(min=1e-300)) for k, x in decile.items()}
        log = torch.stack([x.clamp(min=1e-300).log() for x in layers.values()]).mean(dim=0)
        entry[symbol] = {
            "spread": round(float(torch.tensor(list(ratio.values())).median()), 3),
            "tokens": correlation(log, tokens),
            "reward": correlation(log, rewards),
        }
        for layer, value in ratio.items():
            entry["layers"].setdefault(layer, {})[symbol] = round(value, 3)
    return entry


def make_config(args: argparse.Namespace, *, method: str = "isopo") -> Config:
    """The run whose policy and rollouts are measured."""
    sets = [
        f"rollout.prompts_per_step={args.prompts}",
        f"rollout.samples_per_prompt={args.samples}",
        f"rollout.max_tokens={args.tokens}",
        "rollout.max_prompt=512",
        "task.drop_long=true",
        "train.micro_batch=auto",
        *args.sets,
    ]
    return load_config(
        None, sets, overrides={"method": method, "task": args.task, "model": args.model}
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the measured run."""
    parser.add_argument("task")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--set", nargs="*", default=[], dest="sets", help="settings of the run")
    parser.add_argument("--json", type=Path)


def append(path: Path | None, entry: dict[str, Any]) -> None:
    """Adds an entry to a file that holds a list of them."""
    if path is not None:
        known = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*known, entry], indent=1) + "\n")


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Everything the table and the JSON file say of a start."""
    sizes = [f"evaluate.size={args.problems}", f"evaluate.k={args.k}"]
    args.sets = [*args.sets, *sizes]
    config = make_config(args)
    started = time.perf_counter()
    job = build_language_job(config)
    try:
        loaded = time.perf_counter()
        numbers, answers = job.examine(SILENT)
        examined = time.perf_counter()
        rows = job.collect(0).experience.to(job.policy.device)
        drawn = time.perf_counter()
        entry = {
            "task": args.task,
            "model": args.model,
            "settings": args.sets,
            **{name.removeprefix("eval/"): round(x, 4) for name, x in numbers.items()},
            "responses": len(rows.mask),
            "tokens": quantiles(rows.mask.sum(dim=1)),
            "truncated": round(float(rows.truncated.float().mean()), 4),
            "sampled": round(float(rows.rewards.mean()), 4),
            "mixed_groups": round(_mixed(rows), 4),
        }
        if not args.no_gradients:
            kept = rows.rows(torch.arange(len(rows.mask))[: args.watched])
            entry |= {"watched": len(kept.mask), "gradients": lengths(job, kept)}
        measured = time.perf_counter()
    finally:
        job.close()
    times = (started, loaded, examined, drawn, measured)
    names = ("load", "evaluate", "rollout", "gradients")
    entry["seconds"] = {n: round(b - a, 2) for n, a, b in zip(names, times, times[1:])}
    entry["answers"] = [
        {"completion": a["completion"][:400], "answer": a["answer"], "correct": a["correct"]}
        for a in answers[:3]
    ]
    return entry


def _mixed(rows: Experience) -> float:
    """Share of prompts with right and wrong responses."""
    return float((group_stats(rows.rewards, rows.group).std > 0).float().mean())


def line(entry: dict[str, Any]) -> str:
    """The row of a table: task, accuracies, lengths, spreads."""
    sampled = next((v for k, v in entry.items() if k.startswith("avg@")), entry["sampled"])
    tokens, cells = entry["tokens"], [entry["task"]]
    cells += [f"{100 * entry['accuracy']:.1f} / {100 * sampled:.1f} %"]
    cells += [f"{100 * entry['mixed_groups']:.0f} %"]
    cells += [" / ".join(f"{tokens[k]:.0f}" for k in ("p10", "median", "p90"))]
    for symbol in ("F", "N") if "gradients" in entry else ():
        length = entry["gradients"][symbol]
        cells.append(f"{length['spread']:.2f} ({length['tokens']:+.2f}, {length['reward']:+.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--problems", type=int, default=256, help="held-out problems")
    parser.add_argument("--k", type=int, default=4, help="samples of each held-out problem")
    parser.add_argument("--watched", type=int, help="responses that are weighed; default: all")
    parser.add_argument("--no-gradients", action="store_true")
    args = parser.parse_args()
    entry = profile(args)
    append(args.json, entry)
    print(
        "| task | greedy / sampled | mixed groups | tokens p10 / p50 / p90 | F spread | N spread |"
    )
    print(line(entry))
    print(entry["seconds"], flush=True)


if __name__ == "__main__":
    main()
