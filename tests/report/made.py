"""Comparison folders as `proxpo compare` leaves them, from a seeded generator; scored runs."""

import json
import math
from pathlib import Path

import numpy as np
import yaml

from proxpo.compare.plan import Arm, Choice, Plan, PlannedRun, Seeds, write_plan
from proxpo.report.analysis import analyse
from proxpo.report.run_data import Comparison, Run, rows_by_step

ACCURACY, SAMPLED = "proxpo/eval/accuracy", "proxpo/eval/avg@4"


def curve(gain, step, steps):
    """From 0.5 towards 0.5 + gain."""
    return 0.5 + gain * (1 - math.exp(-4 * step / steps))


BARE = ("step", "reward", "step_time", "proxpo/samples", "proxpo/eval/accuracy", "proxpo/eval/kl")


def rows(gain, seed, *, steps, every, sharp=1.0, last=None, bare=False):
    """Metrics of a run that improves by `gain`; they stop after step `last`; `bare`: a few."""
    draw = np.random.default_rng([seed, round(1000 * gain)])
    shared = np.random.default_rng(seed).normal(scale=0.03)  # what a seed does to every arm
    for step in range((steps if last is None else last) + 1):
        row = {"step": step}
        score = curve(gain, step, steps) + (shared + draw.normal(scale=0.006)) * (step > 0)
        if step:
            row |= {
                "reward": score - 0.2 + draw.normal(scale=0.02),
                "proxpo/samples": 512.0,
                "step_time": 0.8 * sharp + draw.exponential(0.05),
                "proxpo/time/rollout": 0.5,
                "proxpo/time/update": 0.3 * sharp,
                "proxpo/time/sync": 0.01,
                "grad_norm": 2 + draw.exponential(0.5),
                "clip_ratio/region_mean": 0.02 * sharp + draw.exponential(0.002),
                "proxpo/ratio/ess": 1 - 0.05 * sharp + draw.normal(scale=0.005),
                "completions/mean_length": 4.6 + draw.normal(scale=0.1),
                "proxpo/gradient/cosine_reinforce": 0.8 + draw.normal(scale=0.02),
                "num_tokens": 2300 * step,
                "loss": None,
            }
        if step % every == 0 or step == steps:
            row |= {
                "proxpo/eval/accuracy": round(score, 4),
                "proxpo/eval/avg@4": score - 0.22,
                "proxpo/eval/kl": 3 * sharp * step / steps * (1 + 0.2 * draw.random()),
                "proxpo/eval/entropy": 0.4 * math.exp(-sharp * step / steps),
            }
        keep = BARE if bare else row
        yield {name: row[name] for name in row if name in keep or name.startswith("proxpo/time/")}


def config(method, seed, steps, **recipe):
    return {
        "seed": seed,
        "out": None,
        "method": method,
        "recipe": recipe,
        "model": {"name": "tiny", "device": "auto"},
        "task": {"name": "arithmetic"},
        "rollout": {"prompts_per_step": 64, "samples_per_prompt": 8, "temperature": 1.0},
        "train": {"steps": steps, "lr": 2e-4},
    }


def write_run(folder, settings, metrics, *, failure=None, done=True):
    """An ordinary run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with (folder / "metrics.jsonl").open("w") as file:
        for row in metrics:
            file.write(json.dumps(row) + "\n")
    if failure:
        (folder / "failure.json").write_text(json.dumps(failure))
    elif done:
        (folder / "summary.json").write_text(json.dumps({"steps": settings["train"]["steps"]}))


GAINS = {"isopo": 0.33, "grpo": 0.30, "p3o": 0.28, "ema-kpo": 0.275, "reinforce": 0.22}


def comparison(
    folder, *, arms=GAINS, seeds=(1, 2, 3), steps=100, every=10, failed=(), waiting=(), bare=False
):
    """Arms by name and gain; `failed` and `waiting` are pairs (arm, seed)."""
    planned = []
    for number, (arm, gain) in enumerate(arms.items()):
        for seed in seeds:
            name = f"{arm}-seed{seed}".replace(" ", "-").replace("=", "")
            planned.append(PlannedRun(id=name, arm=arm, seed=seed, folder=f"runs/{name}"))
            if (arm, seed) in waiting:
                continue
            lost = (arm, seed) in failed
            last = steps // 2 if lost else None
            metrics = rows(
                gain, seed, steps=steps, every=every, sharp=1 + number / 5, last=last, bare=bare
            )
            reason = {"reason": "the gradient was not finite in 3 updates in a row", "step": last}
            where = folder / "runs" / name
            settings = config(arm.split()[0], seed, steps)
            write_run(where, settings, metrics, failure=reason if lost else None)
            command = f"proxpo train base.yaml --method {arm} --seed {seed} --out runs/{name}"
            (where / "command.txt").write_text(command + "\n")
    plan = Plan(
        title=" against ".join(arms),
        question="Does normalising each sequence's gradient help, at the same budget?",
        base={"steps": steps},
        arms=tuple(Arm(name=arm, method=arm.split()[0], family=arm.split()[0]) for arm in arms),
        seeds=Seeds(report=tuple(seeds)),
        runs=tuple(planned),
    )
    write_plan(plan, folder)
    return folder


def swept(folder, *, rates=(1e-5, 3e-5, 1e-4), steps=20):
    """Two arms, a sweep on seeds 101 and 102, the best rate reported on seeds 1 to 3."""
    planned, chosen = [], []
    best = {"isopo": rates[1], "grpo": rates[2]}
    for arm, rate in best.items():
        scores = []
        for lr in rates:
            gain = (0.3 if arm == "isopo" else 0.28) - 0.1 * abs(
                rates.index(lr) - rates.index(rate)
            )
            for seed, role in [(101, "tune"), (102, "tune"), *((s, "report") for s in (1, 2, 3))]:
                if role == "report" and lr != rate:
                    continue
                name = f"{arm}-lr{lr:g}-{role}-{seed}"
                planned.append(
                    PlannedRun(
                        id=name, arm=arm, seed=seed, role=role, settings={"lr": lr},
                        folder=f"runs/{name}",
                    )
                )  # fmt: skip
                metrics = rows(gain, seed, steps=steps, every=5)
                write_run(folder / "runs" / name, config(arm, seed, steps), metrics)
            scores.append(({"lr": lr}, 0.5 + gain))
        chosen.append(Choice(arm=arm, settings={"lr": rate}, scores=tuple(scores)))
    plan = Plan(
        title="Tuned", question="", base={}, sweep={"lr": rates}, chosen=tuple(chosen),
        arms=tuple(Arm(name=arm, method=arm, family=arm) for arm in best),
        seeds=Seeds(report=(1, 2, 3), tune=(101, 102)), runs=tuple(planned),
    )  # fmt: skip
    write_plan(plan, folder)
    return folder


def varied(folder, *, temperatures=(0.8, 1.0, 1.2), steps=20):
    """grpo and p3o at three temperatures, reinforce at one."""
    arms, planned = [], []
    cases = [(m, t) for m in ("grpo", "p3o") for t in temperatures] + [("reinforce", None)]
    for method, temperature in cases:
        name = method if temperature is None else f"{method} temperature={temperature}"
        values = {} if temperature is None else {"temperature": temperature}
        arms.append(Arm(name=name, method=method, family=method, settings=values, varied=values))
        fall = (
            0.0
            if temperature is None
            else abs(temperature - 1) * (0.5 if method == "grpo" else 0.1)
        )
        for seed in (1, 2, 3):
            at = f"{method}-{temperature}-{seed}"
            planned.append(
                PlannedRun(id=at, arm=name, seed=seed, settings=values, folder=f"runs/{at}")
            )
            metrics = rows(0.3 - fall, seed, steps=steps, every=5)
            write_run(folder / "runs" / at, config(method, seed, steps), metrics)
    plan = Plan(
        title="Temperature", question="Which method survives rollouts at another temperature?",
        base={}, vary={"temperature": temperatures}, arms=tuple(arms),
        seeds=Seeds(report=(1, 2, 3)), runs=tuple(planned),
    )  # fmt: skip
    write_plan(plan, folder)
    return folder


def run_of(name, seed, scores, *, kl=None, **kind):
    """Scores at steps 0, 10, 20, ..."""
    rows = []
    for i, score in enumerate(scores):
        row = {"step": 10.0 * i, ACCURACY: score}
        row |= {"proxpo/eval/kl": kl[i]} if kl else {}
        row |= {"step_time": 2.0, "proxpo/samples": 64.0} if i else {}
        rows.append(row)
    return Run(name=name, method=name, seed=seed, rows=tuple(rows), folder=f"{name}-{seed}", **kind)


def compared(*runs, **more):
    return analyse(Comparison(folder=Path("."), title="t", runs=runs, **more))


def run_at(name, seed, scores, *, kl=None, sampled=None, **kind):
    """A run with scores by step."""
    rows = [{"step": float(step), ACCURACY: value} for step, value in scores.items()]
    rows += [{"step": float(step), SAMPLED: value} for step, value in (sampled or {}).items()]
    rows += [{"step": float(step), "proxpo/eval/kl": value} for step, value in (kl or {}).items()]
    kept = rows_by_step(rows, shown="").rows
    return Run(name=name, method=name, seed=seed, rows=kept, folder=f"{name}-{seed}", **kind)
