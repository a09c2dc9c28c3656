"""The update on one rollout, from top to bottom.

    update            hands the rollout to the recipe's schedule, which asks for steps
    step              cuts it into mini-batches and makes n optimizer steps
    _mini_batch_step  gradient of the mini-batch, clipping, optimizer's step, memory of the stages
    finish            memory of the stages after the rollout

The batch is built in batch.py, the gradient of a mini-batch in minibatch.py.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from proxpo.batch_file import BatchRecorder
from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.exact.policy import ActionBatch, FlatPolicy
from proxpo.ops.metering import logged
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.ops.streams import derive, generator
from proxpo.replay.comparison import last_not_finite
from proxpo.stages.schedule import Rescale, Updates
from proxpo.train.batch import (
    PreparedRollout,
    UpdatePlan,
    prepare_rollout,
    sampled_fields,
    start_fields,
)
from proxpo.train.config import Config
from proxpo.train.experience import (
    Experience,
    join,
    kept_rollouts,
    mini_batches,
    mixture,
    random_prompts,
    with_replayed_share,
)
from proxpo.train.minibatch import gradients
from proxpo.train.scoring import Learner, exact_policy, other_logp, score, widened
from proxpo.types import MOST_SKIPPED, Batch, Clock, Context, Metrics, Recipe, State, finite


@runtime_checkable
class UpdatedJob(Protocol):
    """The parts of a run that the updates on a rollout read and change."""

    config: Config
    learner: Learner
    step: int
    skipped: int
    past: list[Experience]

    @property
    def most_parts(self) -> int: ...

    @property
    def clock(self) -> Clock: ...


def update(
    job: UpdatedJob,
    fresh: Experience,
    *,
    on_batch: Callable[[dict[str, Tensor]], None] | None = None,
) -> dict[str, float]:
    """Makes the optimizer steps of a rollout; returns their mean metrics and the schedule's.

    on_batch: is given the fields of the batch afterwards, as a `BatchRecorder` has them
    """
    config, learner, share = job.config, job.learner, job.config.train.replay_share
    mix = generator(config.seed, "mix", job.step)
    experience = with_replayed_share(fresh, job.past, share, mix)
    record = UpdateRecord(saves_batch=on_batch is not None)
    updates = RolloutUpdates(job, experience, path=("update", job.step), record=record)
    stage = learner.recipe.schedule
    ctx = Context(
        state=learner.state.get("schedule", {}),
        generator=generator(config.seed, "replay", job.step),
        clock=job.clock,
    )
    state, metrics = (stage.apply if stage is not None else as_configured)(updates, ctx)
    updates.finish(state)
    if on_batch is not None and record.batch is not None:
        on_batch(record.batch.fields())
    samples = max(updates.room["samples"], 4 * len(fresh.mask) if share else 0)
    rollouts = updates.room["rollouts"]
    job.past = kept_rollouts(job.past, fresh, samples=samples, rollouts=rollouts)
    return updates.record.means() | {name: float(value) for name, value in metrics.items()}


def as_configured(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
    """The schedule of a recipe without one: as many steps as the settings ask for."""
    updates.step(updates.count, only=True)
    return {}, {}


@dataclass
class UpdateRecord:
    """Metrics of the updates on a rollout, and their batch if it is to be saved.

    values: of all updates, by name
    last: of the last update; applied: of the last that was not skipped
    """

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    last: Metrics = field(default_factory=dict)
    applied: Metrics = field(default_factory=dict)
    saves_batch: bool = False
    batch: BatchRecorder | None = None

    def add(self, metrics: Metrics) -> None:
        for name, value in logged(metrics).items():
            self.values[name].append(float(value))

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.values.items()}


class RolloutUpdates:
    """The trainer's `Updates`: what a schedule may do with one rollout."""

    def __init__(
        self,
        job: UpdatedJob,
        experience: Experience,
        *,
        path: tuple[int | str, ...],
        recipe: Recipe | None = None,
        record: UpdateRecord | None = None,
    ) -> None:
        self.job, self.experience, self.path = job, experience, path
        self.count = job.config.updates
        self.parts = job.config.train.mini_batches
        self.recipe = recipe or job.learner.recipe
        self.record = record or UpdateRecord()
        self.room = {"samples": 0, "rollouts": 0}
        self._exact = False
        self._done = self._others = self._replayed = 0
        self._epoch, self._shuffled = (-1, 0), list[Tensor]()
        self._extra: dict[str, Tensor] = {}
        self._prepared: PreparedRollout | None = None
        self._variants: list[RolloutUpdates] = []

    # --- optimizer steps

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
        parts = self.parts if parts is None else parts
        self._check_prompts(parts)
        rollout, record = self._prepare(single_update=only and n == 1), self.record
        for number in range(self._done, self._done + n):
            index, seed = self._mini_batch(number, parts) if rows is None else self._chosen(rows)
            if not len(index):  # the rollout has fewer prompts than were asked for
                continue
            record.last = self._mini_batch_step(
                recipe or self.recipe, rollout, index, seed=seed, rescale=rescale
            )
            if recipe is None:
                record.add(record.last)
        self._done += n if rows is None else 0
        return record.last

    def variant(self, recipe: Recipe) -> "RolloutUpdates":
        updates = RolloutUpdates(
            self.job, self.experience, path=self.path, recipe=recipe, record=self.record
        )
        updates._extra = self._extra
        self._variants.append(updates)
        return updates

    def _prepare(self, *, single_update: bool = False) -> PreparedRollout:
        """The rollout as the recipe sees it; computed once, at the policy of that moment."""
        if self._prepared is None:
            job, learner, record = self.job, self.job.learner, self.record
            if record.saves_batch and record.batch is None:  # in passes of its own
                fields = sampled_fields(learner, self.experience) | start_fields(
                    learner, self.experience, self._plan
                )
                record.batch = BatchRecorder({"mask": self.experience.mask, **fields})
            seed = derive(job.config.seed, *self.path, "prepare")
            ctx = Context(
                states=learner.state,
                generator=torch.Generator().manual_seed(seed),
                clock=job.clock,
            )
            self._prepared = prepare_rollout(
                learner,
                self.recipe,
                self.experience,
                self._plan,
                ctx,
                single_update=single_update,
                extra=self._extra,
            )
        return self._prepared

    @property
    def _plan(self) -> UpdatePlan:
        learner, mask = self.job.learner, self.experience.mask
        rows = int(mask.sum()) if learner.by_step else len(mask)
        fields = learner.recipe.needs(self.job.clock)
        return UpdatePlan.of(self.recipe, self.job.config, rows=rows, fields=fields)

    def _mini_batch(self, number: int, parts: int) -> tuple[Int[Tensor, " row"], int]:
        """Rows of the next mini-batch of the shuffled prompts, and the seed of its draws."""
        epoch, part = divmod(number, parts)
        if self._epoch != (epoch, parts):
            shuffle = generator(self.job.config.seed, *self.path, epoch)
            self._shuffled = mini_batches(self._prepare().data.experience, shuffle, parts)
            self._epoch = (epoch, parts)
        return self._shuffled[part], derive(self.job.config.seed, *self.path, "noise", number)

    def _chosen(self, rows: Int[Tensor, " row"]) -> tuple[Int[Tensor, " row"], int]:
        """The rows that a schedule chose, and the seed of their draws."""
        self._others += 1
        seed = derive(self.job.config.seed, *self.path, "other", self._others)
        return rows.to(self.experience.group.device), seed

    def _check_prompts(self, parts: int) -> None:
        prompts = self.job.most_parts
        if parts > prompts:
            raise ProxpoError(
                f"{self.recipe.name}: {parts} mini-batches want as many prompts in a rollout, and "
                f"rollout.prompts_per_step is {prompts}"
            )

    def _mini_batch_step(
        self,
        recipe: Recipe,
        rollout: PreparedRollout,
        index: Int[Tensor, " row"],
        *,
        seed: int,
        rescale: Rescale | None,
    ) -> Metrics:
        """Backward, clip, check, step; then the memory of stages that follow every step."""
        job, learner = self.job, self.job.learner
        set_learning_rate(learner.optimizer, job.config.rate_factor(job.step))
        data, clock = rollout.data.rows(index), job.clock
        if self.record.batch is not None:
            now = score(learner, data.experience, replace(rollout.options, old_is_current=False))
            self.record.batch.see(index, now)
        try:
            metrics, batch = gradients(
                learner, recipe, data, rollout.options, seed=seed, clock=clock, rescale=rescale
            )
        except NotFiniteError as error:  # raised by a transform; elsewhere the norm shows it
            learner.fault = _told(learner, error.parameter)
            metrics, batch = {"loss": torch.tensor(math.nan)}, data.batch
            learner.optimizer.zero_grad(set_to_none=True)
            norm = optimizer_step(job, finite=False)
        else:
            norm = optimizer_step(job)
        clip = job.config.train.grad_clip
        metrics = {
            **rollout.metrics,
            **metrics,
            "grad_norm": torch.tensor(norm),
            "gradient/zero": torch.tensor(float(norm == 0)),
            **({"gradient/clipped": torch.tensor(float(norm > clip))} if clip else {}),
        }
        if math.isfinite(norm):
            self.record.applied = metrics
            moved = recipe.step_state(learner.state, batch, metrics, Context(clock=clock))
            learner.state = {**learner.state, **moved}
        return metrics

    def finish(self, schedule: Mapping[str, Tensor] | None = None) -> None:
        """Updates the memory of all stages after the rollout, unless every update was skipped."""
        learner, before, record = self.job.learner, self.job.learner.state, self.record
        if record.last and not record.applied:
            return
        learner.version += self._exact  # the schedule has moved the weights by itself
        used = [each for each in (self, *self._variants) if each._prepared is not None]
        for updates in used or [self]:
            rollout = updates._prepare()
            metrics = {**record.applied, **rollout.metrics}
            moved = updates.recipe.update_state(learner.state, rollout.data.batch, metrics)
            learner.state = moved or learner.state
        if schedule is not None and "schedule" in before:
            memory = finite(dict(schedule), before["schedule"])
            learner.state = {**learner.state, "schedule": memory}
        learner.state = {**before, **learner.state}

    # --- earlier rollouts

    def replay(self, *, start: int = 0, batch: float | None = None) -> bool:
        job, past = self.job, self.job.past
        if not past or sum(len(rollout.mask) for rollout in past) < start:
            return False
        draw = self._replay_draws
        if batch is None:
            replayed = past[int(torch.randint(len(past), (), generator=draw))]
        else:
            kept, prompts = join(past), job.config.rollout.prompts_per_step
            replayed = kept.rows(random_prompts(kept, draw, max(1, round(batch * prompts))))
        updates = RolloutUpdates(job, replayed, path=("replay", job.step, self._replayed))
        updates.step(1, parts=1)
        updates.finish()
        self._replayed += 1
        for name, values in updates.record.values.items():
            self.record.values[name] += values
        return True

    @cached_property
    def _replay_draws(self) -> torch.Generator:
        return generator(self.job.config.seed, "replay", self.job.step)

    def mix(self, *, share: float, rollouts: int) -> None:
        if self._prepared is not None:
            raise ProxpoError("a schedule may mix in earlier rollouts before its first step only")
        draw = generator(self.job.config.seed, "mix", self.job.step)
        self.experience = mixture(self.experience, self.job.past[-rollouts:], share, draw)

    def gather(self, *, tokens: int) -> None:
        if self._prepared is not None:
            raise ProxpoError("a schedule may gather earlier rollouts before its first step only")
        joined = join([*self.job.past, self.experience])
        lengths = joined.mask.sum(dim=1)
        newest = lengths.flip(0).cumsum(0).flip(0) <= tokens
        fresh = torch.arange(len(newest), device=newest.device) >= len(newest) - len(
            self.experience.mask
        )
        rows = (newest | fresh).nonzero()[:, 0]
        self.experience = joined.rows(rows)
        self.keep(samples=len(rows))

    def fit_critic(self, *, draws: int, batch: int, lr: float) -> float:
        learner, rows = self.job.learner, self.experience
        assert learner.critic is not None
        assert learner.critic_optimizer is not None
        assert rows.observations is not None
        states, rewards = rows.observations[rows.mask], rows.rewards[rows.mask.nonzero()[:, 0]]
        draw = generator(self.job.config.seed, *self.path, "critic")
        for group in learner.critic_optimizer.param_groups:
            group["lr"] = lr
        error = 0.0
        for _ in range(draws):
            index = torch.randperm(len(states), generator=draw)[:batch]
            loss = (learner.critic(states[index])[:, 0] - rewards[index]).square().mean() / draws
            loss.backward()
            error += float(loss.detach())
        learner.critic_optimizer.step()
        learner.critic_optimizer.zero_grad(set_to_none=True)
        return error

    def keep(self, *, samples: int = 0, rollouts: int = 0) -> None:
        self.room = {"samples": samples, "rollouts": rollouts}

    # --- batch, weights and optimizer, for schedules that look at them

    def batch(self) -> Batch:
        return self._prepare().data.batch

    @torch.no_grad()
    def now(self, rows: Int[Tensor, " row"]) -> Batch:
        rollout, model = self._prepare(), self.job.learner.policy.model
        batch = rollout.data.batch
        index = rows.to(batch.mask.device)
        training = model.training
        model.eval()
        try:
            options = replace(rollout.options, old_is_current=False)
            fields = score(self.job.learner, self.experience.rows(index), options)
        finally:
            model.train(training)
        wide = {name: widened(value, batch.mask.shape[1]) for name, value in fields.items()}
        return batch.rows(index).replace(**wide).clean()

    def add(self, **fields: Float[Tensor, "seq tok"]) -> None:
        self._extra |= fields
        if self._prepared is not None:
            data = self._prepared.data
            batch = data.batch.replace(**fields).clean(*fields)
            self._prepared = self._prepared._replace(data=data._replace(batch=batch))

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
        self.load(weights)
        try:
            return other_logp(
                learner, self.job.learner.policy.model, self.experience, self._plan.options
            )
        finally:
            self.load(present)

    def exact(self) -> tuple[FlatPolicy, ActionBatch]:
        self._exact = True
        mask, temperature = self.batch().mask, self.job.config.train_temperature
        return exact_policy(
            self.job.learner.policy.model, self.experience, mask, temperature=temperature
        )


def optimizer_step(job: UpdatedJob, *, finite: bool = True) -> float:
    """Clips, checks, steps; returns the gradient's norm. Skips a gradient that is not finite.

    The norm is that of the whole gradient before clipping, after a transform of the method.
    """
    learner, clip = job.learner, job.config.train.grad_clip
    norm, trained = math.nan, learner.trainable()
    if finite:
        total = get_total_norm([p.grad for p in trained if p.grad is not None])
        norm = float(total)
    applied = math.isfinite(norm)
    if applied:
        clip_grads_with_norm_(trained, clip or math.inf, total)
        learner.optimizer.step()
        learner.version += 1
    elif finite:
        learner.fault = _origin(learner)
    job.skipped = 0 if applied else job.skipped + 1
    learner.optimizer.zero_grad(set_to_none=True)
    if learner.transform is not None:
        learner.transform.step(skipped=not applied)
    if job.skipped >= MOST_SKIPPED:
        raise ProxpoError(
            f"step {job.step}: the gradient was not finite in {MOST_SKIPPED} updates in a row"
            f"{learner.fault}; the last checkpoint is from before: lower lr, or set train.grad_clip"
        )
    return norm


def _origin(learner: Learner) -> str:
    """Where a gradient that is not finite comes from, in words."""
    grads = {n: p.grad for n, p in learner.policy.model.named_parameters() if p.grad is not None}
    norms = [float(gradient.double().norm()) for gradient in grads.values()]
    return _told(learner, last_not_finite(list(grads), norms))


def _told(learner: Learner, parameter: str) -> str:
    kind = "unrecorded" if learner.graphs is None else "recorded"
    return f" (from {parameter} back, in the {kind} pass)" if parameter else ""


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiplies the rate that each group of parameters started with."""
    for group in optimizer.param_groups:
        group.setdefault("base_lr", group["lr"])
        group["lr"] = group["base_lr"] * factor


__all__ = ["RolloutUpdates", "optimizer_step", "set_learning_rate", "update"]
