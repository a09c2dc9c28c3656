"""Everything a stage can change, as plain values: stages with equal ones cannot be told apart.

Each kind of stage is watched where it acts: losses, gradients, metrics and state for most, the
plan of a rollout for budgets, the calls of a schedule, the gradients of a small model under a
transform. What a rollout does with prompt filters is watched in tests/train/test_effects.py.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from helpers import gradients, make_batch, method, with_leaves
from methods.cases import CASES, recipe
from methods.toy_updates import ToyUpdates
from torch import Tensor, nn

from proxpo import Batch, ProxpoError, Recipe, Stage
from proxpo.compose import policy_loss, prepare
from proxpo.exact import ActionBatch, FlatPolicy
from proxpo.logp import token_logp
from proxpo.ops.sums import over_microbatches
from proxpo.stages.schedule import variants
from proxpo.train.collect import prompt_factor
from proxpo.types import MANY, Budget, Clock, Context

CLOCKS = (
    Clock(step=3, steps=10, updates=70, learning_rate=0.02),
    Clock(step=10, steps=10, updates=120, learning_rate=0.5),
)


def plain(value: Any) -> Any:
    """Nested values that compare by content, tensors number by number."""
    if isinstance(value, Tensor):
        return repr(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return repr(value)


@functools.cache
def batches() -> tuple[Batch, ...]:
    """Ordinary, far from the old policy, prompts with one response, and rows with gaps."""
    ordinary = make_batch(1, groups=4, size=4)
    rewards = ordinary.rewards.clone()
    rewards[4:8], rewards[9] = 0.5, torch.nan
    mask = ordinary.mask & (torch.arange(16) != 10)[:, None]
    turns = torch.arange(6).expand(16, 6) // 2
    return (
        ordinary,
        make_batch(3, groups=2, size=6, tokens=24, spread=1.5),
        make_batch(2, groups=5, size=1, spread=12.0),
        ordinary.replace(rewards=rewards, mask=mask, turn=turns),
    )


# --- stages of a loss


def of_loss(made: Recipe) -> Iterator[Any]:
    """Whole and in two micro-batches, over two rollouts, early and late in a run."""
    yield prompt_factor(made)
    for batch in batches():
        state = made.init_state()
        for clock in CLOCKS:
            try:
                state, seen = rollout(made, batch, state, clock)
            except ProxpoError as error:
                yield str(error)
                break
            yield plain(seen)


def rollout(made: Recipe, batch: Batch, state: dict, clock: Clock) -> tuple[dict, Any]:
    """The state after a rollout, and what was seen of it."""
    drawn = torch.Generator().manual_seed(0)
    ready = prepare(made, batch, Context(states=state, clock=clock, generator=drawn))
    leaves = with_leaves(ready.batch)
    loss = policy_loss(made, leaves, ready.ctx)
    half = max(len(batch.mask) // 2, 1)
    pieces = [ready.batch.rows(slice(0, half)), ready.batch.rows(slice(half, None))]

    def part(piece: Batch, *, all_sum: Any) -> Any:
        drawn = torch.Generator().manual_seed(1)
        return policy_loss(made, piece, replace(ready.ctx, all_sum=all_sum, generator=drawn))

    all_sum = over_microbatches(part, pieces)
    cut = [part(piece, all_sum=all_sum).value for piece in pieces]
    seen = ready.metrics | loss.metrics
    stepped = made.step_state(state, ready.batch, seen, Context(clock=clock))
    after = {**state, **made.update_state({**state, **stepped}, ready.batch, seen)}
    rows = {name: getattr(ready.batch, name) for name in ("mask", "rewards", "advantages")}
    return after, [loss.value, gradients(loss.value, leaves), cut, seen, after, rows]


def hosts(kind: str, name: str) -> list[Recipe]:
    """Recipes of the catalogue's cases that have the stage."""
    return [made for made in cases() if stage_of(made, kind, name) is not None]


@functools.cache
def cases() -> list[Recipe]:
    """Recipes of the catalogue's cases, and the losses that their schedules take beside them."""
    made = [recipe(case) for case in CASES]
    return made + [part for one in made for part in variants(one) or ()]


def stage_of(made: Recipe, kind: str, name: str) -> Stage | None:
    stages = getattr(made, kind) if kind in MANY else (getattr(made, kind),)
    return next((one for one in stages if one is not None and one.name == name), None)


def with_stage(made: Recipe, stage: Stage) -> Recipe:
    """The recipe with this stage in the place of the one that has its name."""
    if stage.kind not in MANY:
        return made.replace(**{stage.kind: stage})
    others = [one for one in getattr(made, stage.kind) if one.name != stage.name]
    return made.replace(**{stage.kind: (*others, stage)})


# --- stages around a loss


def of_budget(stage: Stage) -> Iterator[Any]:
    """Budgets before each of several visits to the same prompts, and what is remembered."""
    state = stage.init() if stage.init else {}
    right = torch.arange(8).repeat(5) < torch.tensor([0, 4, 4, 4, 7]).repeat_interleave(8)
    for visit in range(3):
        batch = make_batch(visit, groups=5, size=8, tokens=20, holes=False)
        batch = batch.replace(correct=right if visit else ~right, truncated=None, turn=None)
        budget = Budget(
            prompt_id=batch.prompt_id.unique(),
            samples=torch.full((5,), 8),
            max_tokens=torch.full((5,), 20),
        )
        try:
            found, seen = stage.apply(budget, Context(state=state))
        except ProxpoError as error:
            yield str(error)
            return
        yield plain([found.samples, found.max_tokens, seen, state])
        if stage.update:
            state = stage.update(state, batch, seen)


def of_prompts(stage: Stage) -> Iterator[Any]:
    for batch in batches():
        yield plain(stage.apply(batch, Context()))


class Watched(ToyUpdates):
    """A rollout whose KL falls with every step on it, and a small policy for exact steps."""

    def __init__(self, number: int, made: Recipe) -> None:
        batch = make_batch(number, spread=0.5)
        batch = batch.replace(entropy=batch.entropy + (5.0 if number in (6, 24) else 0.0))
        super().__init__(lambda x: x, count=4, parts=2, recipe=made, batch=batch)

    def now(self, rows: Tensor) -> Batch:
        done = sum(call[1] for call in self.calls if call[0] == "step")
        near = self.rollout.vocab_logp * 0.7**done + self.rollout.old_vocab_logp * (1 - 0.7**done)
        return self.rollout.replace(vocab_logp=near.log_softmax(-1)).rows(rows)

    def exact(self) -> tuple[FlatPolicy, ActionBatch]:
        self.model = Small()
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(2)  # far from quadratic, so that the search has to shrink its step
        tokens, mask = self.rollout.tokens, self.rollout.mask
        self.rollout = prepare(method("grpo"), self.rollout).batch
        return FlatPolicy(self.model), ActionBatch(tokens.roll(1, 1), tokens, mask)


def of_schedule(stage: Stage) -> Iterator[Any]:
    """Calls, weights, state and metrics of 30 rollouts."""
    made, state = method("fixpo", radius=0.05), stage.init() if stage.init else {}
    drawn = torch.Generator().manual_seed(0)
    for number in range(30 if stage.name != "line_search" else 1):
        updates = Watched(number, made)
        clock = Clock(step=number, steps=30, updates=2 * number)
        ctx = Context(state=state, generator=drawn, clock=clock)
        state, seen = stage.apply(updates, ctx)
        added = {name: float(value.sum()) for name, value in updates.added.items()}
        yield plain(
            [updates.calls, updates.chosen, updates.theta, updates.moments, added, state, seen]
        )
        yield [str(one) for recipe in updates.variants for _, one in recipe.stages()[:-1]]
        for rescale in updates.rescales:
            yield from of_loss(rescale.loss)
            yield [rescale.factor(norm) for norm in (0.0, 0.1, 0.5, 3.0)]


class Small(nn.Module):
    """Two linear layers behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed, self.inner = nn.Embedding(5, 4), nn.Linear(4, 6)
            self.head = nn.Linear(6, 5)
        self.double()

    def states(self, ids: Tensor) -> Tensor:
        return self.inner(self.embed(ids)).tanh()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids)).log_softmax(-1)


def of_gradient(stage: Stage) -> Iterator[Any]:
    """Gradients of two steps of two micro-batches, the second after the averages have moved."""
    transform, drawn = stage.apply(), torch.Generator().manual_seed(0)
    for _ in range(2):
        model = Small()
        for size in (4, 3):
            ids = torch.randint(5, (size, 7), generator=drawn)
            number = torch.arange(size)[:, None].expand(size, 7)
            advantages = torch.randn(size, generator=drawn, dtype=torch.float64)
            with transform.applied(
                model, sequences=number, advantages=advantages, groups=torch.arange(size) // 2
            ):
                last = (torch.arange(7) == 6).expand_as(ids)
                weight, bias = model.head.weight, model.head.bias
                logp = token_logp(model.states(ids), weight, ids.roll(-1, 1), bias=bias, mask=~last)
                (-logp.sum()).backward()
        yield [repr(p.grad.tolist()) for p in model.parameters()]
        transform.step()


WATCHED = {
    "budget": of_budget,
    "prompts": of_prompts,
    "schedule": of_schedule,
    "gradient": of_gradient,
}
