"""Ratios of stale and hot data: effective sample size, clips, gradients kept, smoothing by length.

    python scripts/ratio_why.py column-sums --model runs/warm-sums --json ratios.json
    python scripts/ratio_why.py arithmetic:mixed --model tiny --tokens 8 --lr 1e-4

Rollouts are drawn by the policy as it is, at each of `--temperatures`; the policy is trained at 1
and then moved by GRPO updates on quarters of another rollout, as with several updates a rollout.
After each of `--updates`, for every rollout:

    ess        (Σ r)² / (n Σ r²) of the token ratios r = π/π_old
    kl         k3 estimate of KL(π_old‖π) a token, from tokens of π_old
    clipped    share of tokens outside the method's trust region
    kept       Σ |∂L/∂log π| over that of the unclipped token ratio with the method's own average
    unclipped  cosine of the method's gradient with that one
    fresh      cosine with that one on a rollout of the moved policy; `again`: of two such rollouts

By length, in thirds of the responses: mean and standard deviation of the log-ratios that a method
uses, the mean and the root mean square of their distance to the token's own, and the share outside
the clip. `fitted` are the variances of the Kalman filter that the log-ratios themselves ask for
(a random walk seen through noise: Cov(Δz_t, Δz_t-1) = -V, Var(Δz) = Q + 2V), and their final gain.
"""

import argparse
import math
from dataclasses import replace
from typing import Any

import torch
from isopo_why import cosine
from task_profile import add_arguments, append, cut_by_tokens, make_config
from torch import Tensor

from proxpo.compose import policy_loss, prepare
from proxpo.ops.kl import kl_estimate
from proxpo.settings import make_recipe
from proxpo.stages.ratio import token
from proxpo.stages.ratio._scan import kalman_gains
from proxpo.stages.trust import unclipped
from proxpo.stages.trust.ess import ess
from proxpo.train.experience import Experience
from proxpo.train.language import LanguageJob, build_language_job
from proxpo.train.scoring import LogpOptions, forward, score
from proxpo.train.update import RolloutUpdates
from proxpo.types import Batch, Context, Recipe

METHODS = ("grpo", "cispo", "p3o", "gspo", "kpo", "ema-kpo")
SMOOTHED = ("token", "gspo", "kpo", "ema-kpo")
PASS = LogpOptions(temperature=1.0, micro_batch=None)
PARTS = 4  # mini-batches of the rollout that moves the policy


def recipe_of(name: str) -> Recipe:
    """A method with its defaults, on the responses as they are."""
    return make_recipe(name).replace(prompts=(), filter=(), prune=())


def baseline(recipe: Recipe) -> Recipe:
    """The method with the token's own ratio and no trust region."""
    return recipe.replace(ratio=token(), trust=unclipped(), regularisers=())


def slope(recipe: Recipe, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """∂L/∂log π of every token, and the metrics of the loss."""
    logp = batch.logp.detach().requires_grad_()
    prepared, ctx, _ = prepare(recipe, batch.replace(logp=logp), Context())
    value, metrics = policy_loss(recipe, prepared, ctx)
    return torch.autograd.grad(value, logp)[0], dict(metrics)


def gradients(job: LanguageJob, rows: Experience, slopes: dict[str, Tensor]) -> dict[str, list]:
    """Gradients of losses with these slopes, from one forward pass a micro-batch."""
    parameters = job.learner.trainable()
    totals = {name: [torch.zeros_like(p) for p in parameters] for name in slopes}
    for part in cut_by_tokens(job, rows):
        cut = rows.rows(part)
        logp = forward(job.learner, cut, PASS)["logp"]
        for name, weights in slopes.items():
            own = weights[part][:, : logp.shape[1]].to(logp.dtype)
            grads = torch.autograd.grad(logp, parameters, own, retain_graph=True, allow_unused=True)
            for total, grad in zip(totals[name], grads):
                if grad is not None:
                    total.add_(grad)
        del logp
    return totals


def draw(job: LanguageJob, number: int, temperature: float, cursor: int) -> Experience:
    """A rollout at this temperature, on the prompts from `cursor` on."""
    config = job.config
    job.config = replace(config, rollout=replace(config.rollout, temperature=temperature))
    job.source.cursor = cursor
    try:
        return job.collect(number).experience.to(job.policy.device)
    finally:
        job.config = config


def batch_of(job: LanguageJob, rows: Experience, old: Tensor | None = None) -> Batch:
    """The rollout as a recipe sees it, with log π of the present policy; old: that by default."""
    logp = score(job.learner, rows, PASS)["logp"].float()
    return Batch(
        logp=logp,
        old_logp=logp if old is None else old,
        mask=rows.mask,
        rewards=rows.rewards,
        group=rows.group,
    )


def fresh_gradients(job: LanguageJob, number: int, cursor: int) -> dict[str, list[Tensor]]:
    """Gradients of every average on a rollout of the policy of this moment."""
    rows = draw(job, number, 1.0, cursor)
    batch = batch_of(job, rows)
    return gradients(job, rows, {name: slope(base, batch)[0] for name, base in BASES.items()})


RECIPES = {name: recipe_of(name) for name in METHODS}
BASES = {recipe.aggregate.name: baseline(recipe) for recipe in RECIPES.values()}


def directions(
    job: LanguageJob, rows: Experience, batch: Batch, fresh: dict[str, list[Tensor]]
) -> dict[str, Any]:
    """Clips, shares kept and cosines of every method."""
    slopes, results = {}, {}
    plain = {name: slope(base, batch)[0] for name, base in BASES.items()}
    for name, recipe in RECIPES.items():
        slopes[name], metrics = slope(recipe, batch)
        own, _ = slope(recipe.replace(regularisers=()), batch)
        base = plain[recipe.aggregate.name]
        results[name] = {
            "clipped": round(float(metrics["trust/clipped"]), 4),
            "kept": round(float(own.abs().sum() / base.abs().sum().clamp(min=1e-30)), 4),
        }
    found = gradients(job, rows, slopes | plain)
    for name, recipe in RECIPES.items():
        kind = recipe.aggregate.name
        results[name]["unclipped"] = round(cosine(found[name], found[kind]), 4)
        results[name]["fresh"] = round(cosine(found[name], fresh[kind]), 4)
    for kind in BASES:
        results[f"unclipped, {kind}"] = {"fresh": round(cosine(found[kind], fresh[kind]), 4)}
    return results


def by_length(batch: Batch) -> list[dict[str, Any]]:
    """Log-ratios as the methods use them, in thirds of the responses by length."""
    lengths, raw = batch.mask.sum(dim=1), batch.logp - batch.old_logp
    ratios = {"token": raw}
    for name in SMOOTHED[1:]:
        ratio, _ = RECIPES[name].ratio.apply(batch, Context())
        ratios[name] = ratio.detach().log().expand_as(raw)
    parts = []
    for third in lengths.argsort(stable=True).tensor_split(3):
        mask = torch.zeros_like(batch.mask)
        mask[third] = batch.mask[third]
        entry: dict[str, Any] = {
            "tokens": [int(lengths[third].min()), int(lengths[third].max())],
            "responses": len(third),
        }
        for name, ratio in ratios.items():
            own, apart = ratio[mask].double(), (ratio - raw)[mask].double()
            low, high = clip_of(name)
            entry[name] = {
                "mean": float(own.mean()),
                "std": float(own.std()),
                "bias": float(apart.mean()),
                "rms": float(apart.square().mean().sqrt()),
                "outside": float(((own < low) | (own > high)).double().mean()),
            }
        parts.append(entry)
    return parts


def clip_of(name: str) -> tuple[float, float]:
    """Bounds of the log-ratio in a method's clip; GRPO's for the token's own."""
    options = RECIPES["grpo" if name == "token" else name].trust.options
    low, high = (torch.tensor(1 + x) for x in (-options["clip_low"], options["clip_high"]))
    return float(low.log()), float(high.log())


def fitted(batch: Batch) -> dict[str, float]:
    """Q and V of a random walk seen through noise, from the log-ratios, and the gain of its end."""
    z, mask = (batch.logp - batch.old_logp).double(), batch.mask
    step, inside = z[:, 1:] - z[:, :-1], mask[:, 1:] & mask[:, :-1]
    both = inside[:, 1:] & inside[:, :-1]
    if not bool(both.any()):
        return {}
    covariance = float((step[:, 1:] * step[:, :-1])[both].mean())
    v = max(-covariance, 0.0)
    q = max(float(step[inside].square().mean()) - 2 * v, 0.0)
    s = math.sqrt(q / v) if v > 0 else math.inf
    return {"q": q, "v": v, "gain": s * (math.hypot(s, 2) - s) / 2 if v > 0 else 1.0}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.sets = [*args.sets, "train.graphs=off", "train_temperature=1.0", f"lr={args.lr}"]
    job = build_language_job(make_config(args, method="grpo"))
    try:
        cursor = job.source.cursor
        drawn = {t: draw(job, i, t, cursor) for i, t in enumerate(args.temperatures)}
        moving = draw(job, 50, 1.0, cursor + args.prompts)
        old = {  # of the trainer where it has drawn them, else of the sampler, as in training
            t: score(job.learner, rows, PASS)["logp"].float() if t == 1 else rows.rollout_logp
            for t, rows in drawn.items()
        }
        updates = RolloutUpdates(job, moving, path=("moving",))
        cells: list[dict[str, Any]] = []
        done = 0
        for number in sorted(args.updates):
            while done < number:
                updates.step(1, parts=PARTS)
                done += 1
            job.sync()
            fresh, again = (fresh_gradients(job, 100 + 2 * done + i, cursor) for i in range(2))
            for t, rows in drawn.items():
                batch = batch_of(job, rows, old[t])
                cells.append(cell(job, rows, batch, fresh) | {"temperature": t, "updates": done})
                cells[-1]["again"] = {k: round(cosine(fresh[k], again[k]), 4) for k in BASES}
                print(f"T {t:g}, {done} updates:", summary(cells[-1]), flush=True)
        rates = {"lr": args.lr, "prompts": args.prompts, "samples": args.samples}
        return {"task": args.task, "model": args.model, **rates, "cells": cells, "gains": gains()}
    finally:
        job.close()


def cell(
    job: LanguageJob, rows: Experience, batch: Batch, fresh: dict[str, list[Tensor]]
) -> dict[str, Any]:
    """One rollout under one policy."""
    ratio = (batch.logp - batch.old_logp).exp()
    return {
        "ess": round(float(ess(ratio, batch.mask)), 4),
        "kl": float(kl_estimate(batch.old_logp, batch.logp)[batch.mask].mean()),
        "methods": directions(job, rows, batch, fresh),
        "lengths": by_length(batch),
        "fitted": fitted(batch),
    }


def gains() -> dict[str, dict[str, float]]:
    """Gains of the filters at some tokens of a response."""
    chosen = {}
    for name in ("kpo", "ema-kpo"):
        options = {k: RECIPES[name].ratio.options[k] for k in ("q", "v", "p0")}
        schedule = kalman_gains(1000, **options)
        chosen[name] = {str(t): float(schedule[t - 1]) for t in (1, 3, 10, 30, 100, 300, 1000)}
    return chosen


def summary(entry: dict[str, Any]) -> str:
    """One line of a cell."""
    methods = entry["methods"]
    kept = ", ".join(f"{name} {methods[name]['kept']:.2f}" for name in METHODS)
    return f"ESS {entry['ess']:.3f}, KL {entry['kl']:.2g} a token, kept {kept}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.2, 1.4])
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    append(args.json, measure(args))


if __name__ == "__main__":
    main()
