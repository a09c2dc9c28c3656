"""The optimizer steps on one rollout: passes, mini-batches, stale data, nothing non-finite."""

import math
from collections import defaultdict
from dataclasses import replace

import torch

from proxpo.compose import prepare
from proxpo.errors import ProxpoError
from proxpo.shapes import Int, Tensor
from proxpo.train.config import Config
from proxpo.train.experience import Experience, join
from proxpo.train.job import Job
from proxpo.train.learner import Learner, Pass, gradients, needs, score
from proxpo.train.streams import derive, generator
from proxpo.types import Batch, Recipe

MOST_SKIPPED = 5  # updates in a row without a finite gradient before the run stops


def update(job: Job, fresh: Experience) -> dict[str, float]:
    """All optimizer steps of a step: on the rollout, then on replayed data if the recipe wants."""
    config, learner = job.config, job.learner
    seen: dict[str, list[float]] = defaultdict(list)
    rows = _mixed(job, fresh)
    counts = generator(config.seed, "replay", job.step)
    on_policy, replayed = config.updates, 0
    if learner.recipe.schedule is not None:
        on_policy, replayed = learner.recipe.schedule.apply(on_policy, counts)
    fresh_only = on_policy == 1 and not replayed and _scores_late(learner.recipe)
    batch = batch_of(job, rows, late=fresh_only)
    for recipe in learner.recipe.passes or (learner.recipe.fresh or learner.recipe,):
        _train_on(job, recipe, rows, batch, on_policy, ("update", job.step), seen)
    for number in range(replayed if job.past else 0):
        old = job.past[int(torch.randint(len(job.past), (), generator=counts))]
        path = ("replay", job.step, number)
        _train_on(job, learner.recipe, old, batch_of(job, old), 1, path, seen)
    _remember(job, fresh)
    return {name: sum(values) / len(values) for name, values in seen.items()}


def _train_on(
    job: Job,
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    updates: int,
    path: tuple[int | str, ...],
    seen: dict[str, list[float]],
) -> None:
    """`updates` optimizer steps, each on the next mini-batch of the shuffled prompts."""
    config, learner = job.config, job.learner
    how = replace(_pass(config, len(rows.mask)), fresh=batch.old_logp is None)
    if batch.old_logp is None:
        batch = batch.replace(old_logp=batch.logp)
    ready = prepare(recipe, batch, state=learner.state)
    parts = min(config.train.mini_batches, updates)
    for number in range(updates):
        epoch, part = divmod(number, parts)
        shuffle = generator(config.seed, *path, epoch)
        index = _prompts(rows, shuffle, parts, part)
        seed = derive(config.seed, *path, "noise", number)
        _set_rate(learner, config, job.step)
        metrics = gradients(
            learner, recipe, rows.rows(index), ready.batch.rows(index), how=how, seed=seed
        )
        norm = _step(job)
        for name, value in {**ready.metrics, **metrics}.items():
            seen[name].append(float(value))
        seen["grad_norm"].append(norm)
    learner.state = recipe.update_state(learner.state, ready.batch, ready.metrics) or learner.state


def batch_of(job: Job, rows: Experience, *, late: bool = False) -> Batch:
    """The recipe's view of a rollout: log-probabilities of every policy it compares.

    late: where the data are the current policy's own, `old_logp` is left to the update itself.
    """
    learner, how = job.learner, _pass(job.config, len(rows.mask))
    wanted = needs(learner.recipe)
    known = {
        "rollout_logp": rows.rollout_logp,
        "rewards": rows.rewards,
        "group": rows.group,
        "correct": rows.correct,
        "truncated": rows.truncated,
        "lag": (learner.version - rows.version)[:, None].expand_as(rows.mask),
        "greedy_rewards": rows.greedy_rewards,
    }
    stale = bool((rows.version != learner.version).any()) or _off_temperature(job.config)
    late = late and not stale
    needed = wanted - {"old_logp"} if late else wanted
    current = score(learner, rows, how=how) if _needs_scores(needed, stale) else {}
    logp = current.get("logp", rows.rollout_logp)
    known["prox_logp"] = logp
    # The behaviour policy: the sampler's own numbers where it was another policy than the trainer's
    # of this moment; the trainer's otherwise, which are free of the sampler's rounding.
    known["old_logp"] = rows.rollout_logp if stale or "prox_logp" in wanted else logp
    if late and not current:
        known["old_logp"] = None
    if "entropy" in current:
        known["entropy"] = current["entropy"]
    if "values" in current:
        known["old_values"] = known["values"] = current["values"]
    if learner.reference is not None:
        known["ref_logp"] = score(learner, rows, how=how, model=learner.reference)["logp"]
    return Batch(logp=logp, mask=rows.mask, **known)


def _needs_scores(wanted: set[str], stale: bool) -> bool:
    fresh_old = "old_logp" in wanted and not stale
    return fresh_old or bool(wanted & {"prox_logp", "values", "old_values", "entropy", "returns"})


def _scores_late(recipe: Recipe) -> bool:
    """Whether nothing reads `old_logp` before the update: no reward, filter or advantage does."""
    early = [*recipe.reward, *recipe.filter, *([recipe.advantage] if recipe.advantage else [])]
    return not recipe.passes and not any("old_logp" in stage.needs for stage in early)


def _step(job: Job) -> float:
    """Clip, check, step. A gradient that is not finite is dropped, counted, and told."""
    learner, clip = job.learner, job.config.train.grad_clip
    norm = float(torch.nn.utils.clip_grad_norm_(learner.trainable(), clip or math.inf))
    if math.isfinite(norm):
        learner.optimizer.step()
        job.skipped = 0
    else:
        job.skipped += 1
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.transform is not None:
        learner.transform.step()
    learner.version += 1
    if job.skipped >= MOST_SKIPPED:
        raise ProxpoError(
            f"step {job.step}: the gradient was not finite in {MOST_SKIPPED} updates in a row; the "
            "last checkpoint is from before: lower lr, or set train.grad_clip"
        )
    return norm


def _set_rate(learner: Learner, config: Config, step: int) -> None:
    """Warm-up, then constant, linear or cosine decay over the run's steps."""
    train = config.train
    factor = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
    done = step / train.steps
    factor *= {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
        train.lr_schedule
    ]
    for group in learner.optimizer.param_groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = group["base_lr"] * factor


def _prompts(
    rows: Experience, shuffle: torch.Generator, parts: int, part: int
) -> Int[Tensor, " row"]:
    """Rows of the part-th share of the shuffled prompts; responses to a prompt stay together."""
    _, index = rows.group.unique(return_inverse=True)
    index = index.cpu()
    order = torch.randperm(int(index.max()) + 1, generator=shuffle)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    ranks = place[index]
    share = ranks * parts // len(order)
    chosen = (share == part).nonzero()[:, 0]
    return chosen[ranks[chosen].argsort(stable=True)].to(rows.group.device)


def _mixed(job: Job, fresh: Experience) -> Experience:
    """The rollout with `replay_share` of its prompts replaced by those of earlier ones."""
    config = job.config
    prompts = config.rollout.prompts_per_step
    old = round(config.train.replay_share * prompts)
    if not old or not job.past:
        return fresh
    draw = generator(config.seed, "mix", job.step)
    earlier = join(job.past)
    kept = (
        _prompts(fresh, draw, prompts, 0) if prompts == old else _first(fresh, draw, prompts - old)
    )
    return join([fresh.rows(kept), earlier.rows(_first(earlier, draw, old))])


def _first(rows: Experience, shuffle: torch.Generator, prompts: int) -> Int[Tensor, " row"]:
    """All rows of `prompts` prompts drawn at random."""
    groups, index = rows.group.unique(return_inverse=True)
    chosen = torch.randperm(len(groups), generator=shuffle)[:prompts].to(index.device)
    return torch.isin(index, chosen).nonzero()[:, 0]


def _remember(job: Job, fresh: Experience) -> None:
    """Keep rollouts for replay, as many as can be drawn from."""
    schedule = job.learner.recipe.schedule
    capacity = schedule.options.get("capacity", 0) if schedule is not None else 0
    if job.config.train.replay_share:
        capacity = max(capacity, 4 * len(fresh.mask))
    job.past = [*job.past, fresh] if capacity else []
    while sum(len(one.mask) for one in job.past) > max(capacity, len(fresh.mask)):
        job.past.pop(0)


def _pass(config: Config, rows: int) -> Pass:
    return Pass(
        temperature=config.train_temperature, micro_batch=config.train.micro_batch or max(rows, 1)
    )


def _off_temperature(config: Config) -> bool:
    return config.train_temperature != config.rollout.temperature or config.rollout.top_p != 1.0


__all__ = ["batch_of", "update"]
