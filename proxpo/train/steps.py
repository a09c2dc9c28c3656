"""`proxpo.stages.schedule.Updates` of the trainer: one rollout in the hands of a schedule."""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from proxpo.compose import prepare
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.exact.policy import ActionBatch, FlatPolicy
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.stages.schedule import Rescale
from proxpo.train.config import Config
from proxpo.train.descent import gradients
from proxpo.train.experience import Experience, join
from proxpo.train.fields import (
    batch_of,
    judges_first,
    pass_of,
    sampled,
    scored_where,
    scores_late,
)
from proxpo.train.job import Job
from proxpo.train.learner import Learner, Pass, score, widened
from proxpo.train.replay import any_of, mixture, share_of
from proxpo.types import MOST_SKIPPED, Batch, Context, Metrics, Recipe, finite


class Ready(NamedTuple):
    """A prepared rollout, and how its log-probabilities are to be computed."""

    batch: Batch
    metrics: Metrics
    how: Pass


@dataclass
class Record:
    """Metrics of the updates on a rollout: all values by name, the last update's, the last made."""

    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    last: Metrics = field(default_factory=dict)
    made: Metrics = field(default_factory=dict)  # of the last update that was not left out

    def add(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.seen[name].append(float(value))


class Steps:
    """What a schedule may do with a rollout (see `Updates`), and what it has done so far."""

    def __init__(
        self,
        job: Job,
        rows: Experience,
        *,
        path: tuple[int | str, ...],
        recipe: Recipe | None = None,
        record: Record | None = None,
    ) -> None:
        self.job, self.rows, self.path = job, rows, path
        self.count = job.config.updates
        self.parts = job.config.train.mini_batches
        self.recipe = recipe or job.learner.recipe
        self.record = record or Record()
        self.room = {"samples": 0, "rollouts": 0}
        self._late = self._exact = False
        self._done = self._others = self._replayed = 0
        self._fields: dict[str, Tensor] = {}
        self._ready: Ready | None = None
        self._variants: list[Steps] = []

    def variant(self, recipe: Recipe) -> "Steps":
        steps = Steps(self.job, self.rows, path=self.path, recipe=recipe, record=self.record)
        steps._fields = self._fields
        self._variants.append(steps)
        return steps

    def step(
        self,
        n: int = 1,
        *,
        parts: int | None = None,
        recipe: Recipe | None = None,
        rows: Int[Tensor, " row"] | None = None,
        only: bool = False,
        rescale: Rescale | None = None,
    ) -> Metrics:
        self._late = only and n == 1 and scores_late(self.recipe)
        parts = self._checked(self.parts if parts is None else parts)
        ready, record = self._prepared(), self.record
        for number in range(self._done, self._done + n):
            index, seed = self._part(number, parts) if rows is None else self._given(rows)
            if not len(index):  # the rollout has fewer prompts than were asked for
                continue
            record.last = self._descend(recipe or self.recipe, ready, index, seed, rescale)
            if recipe is None:
                record.add(record.last)
        self._done += n if rows is None else 0
        return record.last

    def replay(self, *, start: int = 0, batch: float | None = None) -> bool:
        job = self.job
        if not job.past or sum(len(one.mask) for one in job.past) < start:
            return False
        draw = self._chance
        if batch is None:
            old = job.past[int(torch.randint(len(job.past), (), generator=draw))]
        else:
            kept, prompts = join(job.past), job.config.rollout.prompts_per_step
            old = kept.rows(any_of(kept, draw, max(1, round(batch * prompts))))
        path = ("replay", job.step, self._replayed)
        steps = Steps(job, old, path=path)
        steps.step(1, parts=1)
        steps.finish()
        self._replayed += 1
        for name, values in steps.record.seen.items():
            self.record.seen[name] += values
        return True

    def mix(self, *, share: float, rollouts: int) -> None:
        if self._ready:
            raise ProxpoError("a schedule may mix in earlier rollouts before its first step only")
        draw = generator(self.job.config.seed, "mix", self.job.step)
        self.rows = mixture(self.rows, self.job.past[-rollouts:], share, draw)

    def keep(self, *, samples: int = 0, rollouts: int = 0) -> None:
        self.room = {"samples": samples, "rollouts": rollouts}

    def batch(self) -> Batch:
        return self._prepared().batch

    @torch.no_grad()
    def now(self, rows: Int[Tensor, " row"]) -> Batch:
        ready, model = self._prepared(), self.job.policy.model
        index = rows.to(ready.batch.mask.device)
        training = model.training
        model.eval()
        try:
            how = replace(ready.how, fresh=False)
            found = score(self.job.learner, self.rows.rows(index), how=how)
        finally:
            model.train(training)
        width = ready.batch.mask.shape[1]
        wide = {name: widened(value, width) for name, value in found.items()}
        return ready.batch.rows(index).replace(**wide).clean()

    def add(self, **fields: Float[Tensor, "seq tok"]) -> None:
        self._fields |= fields
        if self._ready is not None:
            batch = self._ready.batch.replace(**fields).clean(*fields)
            self._ready = self._ready._replace(batch=batch)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.job.learner.trainable()]

    @torch.no_grad()
    def load(self, weights: list[Tensor]) -> None:
        for p, value in zip(self.job.learner.trainable(), weights, strict=True):
            p.copy_(value)

    def optimizer_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.job.learner.optimizer.state_dict())

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.job.learner.optimizer.load_state_dict(state)

    def logp(self, weights: list[Tensor]) -> Float[Tensor, "seq tok"]:
        learner, present = self.job.learner, self.weights()
        how = pass_of(self.job.config, len(self.rows.mask))
        self.load(weights)
        try:
            return score(learner, self.rows, how=how, model=self.job.policy.model)["logp"]
        finally:
            self.load(present)

    def exact(self) -> tuple[FlatPolicy, ActionBatch]:
        self._exact = True
        batch, rows, width = self.batch(), self.rows, self.rows.mask.shape[1]
        places = (rows.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        given = {"attention_mask": rows.attention_mask, "position_ids": places, "use_cache": False}
        temperature = self.job.config.train_temperature

        def read(model: Any, inputs: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the others know no forward-mode derivative
                logits = model(input_ids=inputs, **given).logits
            return logits[:, -width - 1 : -1].float() / temperature

        samples = ActionBatch(rows.input_ids, rows.input_ids[:, -width:], batch.mask)
        return FlatPolicy(self.job.policy.model, read), samples

    def finish(self, schedule: Mapping[str, Tensor] | None = None) -> None:
        """The state of every stage after the rollout; the old one if all updates were left out."""
        learner, before = self.job.learner, self.job.learner.state
        record = self.record
        if record.last and not record.made:
            return
        learner.version += self._exact  # the schedule has moved the weights by itself
        used = [steps for steps in (self, *self._variants) if steps._ready is not None]
        for steps in used or [self]:
            ready = steps._prepared()
            seen = {**record.made, **ready.metrics}
            moved = steps.recipe.update_state(learner.state, ready.batch, seen)
            learner.state = moved or learner.state
        if schedule is not None and "schedule" in before:
            memory = finite(dict(schedule), before["schedule"])
            learner.state = {**learner.state, "schedule": memory}
        learner.state = {**before, **learner.state}

    @cached_property
    def _chance(self) -> torch.Generator:
        return generator(self.job.config.seed, "replay", self.job.step)

    def _prepared(self) -> Ready:
        """The rollout as the recipe sees it; computed once, at the policy of that moment."""
        if self._ready is None:
            self._ready = self._prepare()
        return self._ready

    def _prepare(self) -> Ready:
        job, rows, variant = self.job, self.rows, self.recipe
        how = pass_of(job.config, len(rows.mask))
        seed = derive(job.config.seed, *self.path, "prepare")
        ctx = Context(
            states=job.learner.state,
            generator=torch.Generator().manual_seed(seed),
            clock=job.clock,
        )
        if judges_first(variant):
            bare = Batch(logp=rows.rollout_logp, mask=rows.mask, **sampled(job, rows))
            batch, _, metrics = prepare(variant, bare, ctx)
            index = batch.mask.any(dim=1).nonzero()[:, 0]
            if len(index):
                found = scored_where(job, rows, index, late=self._late) | self._fields
                batch = batch.replace(**found).clean(*found)
        else:
            batch = batch_of(job, rows, late=self._late).replace(**self._fields)
        how = replace(how, fresh=batch.old_logp is None)
        if batch.old_logp is None:
            batch = batch.replace(old_logp=batch.logp)
        if not judges_first(variant):
            batch, _, metrics = prepare(variant, batch, ctx)
        return Ready(batch, metrics, how)

    def _part(self, number: int, parts: int) -> tuple[Tensor, int]:
        """Rows of the next mini-batch of the shuffled prompts, and the seed of its draws."""
        epoch, part = divmod(number, parts)
        shuffle = generator(self.job.config.seed, *self.path, epoch)
        index = share_of(self.rows, shuffle, parts, part)
        return index, derive(self.job.config.seed, *self.path, "noise", number)

    def _checked(self, parts: int) -> int:
        prompts = self.job.config.rollout.prompts_per_step
        if parts > prompts:
            raise ProxpoError(
                f"{self.recipe.name}: {parts} mini-batches want as many prompts in a rollout, and "
                f"rollout.prompts_per_step is {prompts}"
            )
        return parts

    def _given(self, rows: Int[Tensor, " row"]) -> tuple[Tensor, int]:
        self._others += 1
        seed = derive(self.job.config.seed, *self.path, "other", self._others)
        return rows.to(self.rows.group.device), seed

    def _descend(
        self, recipe: Recipe, ready: Ready, index: Tensor, seed: int, rescale: Rescale | None
    ) -> Metrics:
        """Backward, clip, check, step; then the stages that follow every step."""
        job, learner = self.job, self.job.learner
        set_rate(learner, job.config, job.step)
        rows, batch, clock = self.rows.rows(index), ready.batch.rows(index), job.clock
        try:
            metrics, batch = gradients(
                learner,
                recipe,
                rows,
                batch,
                how=ready.how,
                seed=seed,
                clock=clock,
                rescale=rescale,
            )
        except NotFiniteError:  # a transform that would not go on; elsewhere the norm tells
            metrics = {"loss": torch.tensor(math.nan)}
            learner.optimizer.zero_grad(set_to_none=True)
            norm = optimizer_step(job, finite=False)
        else:
            norm = optimizer_step(job)
        metrics = {**ready.metrics, **metrics, "grad_norm": torch.tensor(norm)}
        if math.isfinite(norm):
            self.record.made = metrics
            moved = recipe.step_state(learner.state, batch, metrics, Context(clock=clock))
            learner.state = {**learner.state, **moved}
        return metrics


def optimizer_step(job: Job, *, finite: bool = True) -> float:
    """Clip, check, step. A gradient that is not finite is counted and leaves no other trace."""
    learner, clip = job.learner, job.config.train.grad_clip
    norm = math.nan
    if finite:
        norm = float(torch.nn.utils.clip_grad_norm_(learner.trainable(), clip or math.inf))
    made = math.isfinite(norm)
    if made:
        learner.optimizer.step()
        learner.version += 1
    job.skipped = 0 if made else job.skipped + 1
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.transform is not None:
        learner.transform.step(skipped=not made)
    if job.skipped >= MOST_SKIPPED:
        raise ProxpoError(
            f"step {job.step}: the gradient was not finite in {MOST_SKIPPED} updates in a row; the "
            "last checkpoint is from before: lower lr, or set train.grad_clip"
        )
    return norm


def set_rate(learner: Learner, config: Config, step: int) -> None:
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


__all__ = ["Steps", "optimizer_step", "set_rate"]
