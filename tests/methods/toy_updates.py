"""A schedule's `Updates` without a model: one vector of weights, plain gradient descent."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import make_batch, method
from torch import Tensor

from proxpo import Batch, Recipe
from proxpo.stages.schedule import Rescale
from proxpo.types import Clock, Context


class ToyUpdates:
    """Remembers what it was asked for."""

    def __init__(
        self,
        grad: Callable[[Tensor], Tensor] = torch.zeros_like,
        *,
        lr: float = 0.1,
        count: int = 1,
        parts: int = 1,
        recipe: Recipe | None = None,
        batch: Batch | None = None,
    ) -> None:
        self.theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        self.grad, self.lr, self.count, self.parts = grad, lr, count, parts
        self.recipe = recipe or method("grpo")
        self.rollout = batch or make_batch(1)
        self.calls: list[tuple] = []
        self.chosen: list[int] = []
        self.added: dict[str, Tensor] = {}
        self.moments = 0
        self.rescales: list[Rescale] = []
        self.variants: list[Recipe] = []

    def step(
        self, n=1, *, parts=None, recipe=None, rows=None, only=False, rescale=None
    ) -> dict[str, Tensor]:
        self.calls.append(("step", n, parts, only))
        if rows is not None:
            self.chosen.append(len(rows))
        if rescale is not None:
            self.rescales.append(rescale)
        for _ in range(n):
            self.theta = self.theta - self.lr * self.grad(self.theta)
            self.moments += 1
        return {}

    def variant(self, recipe: Recipe) -> "ToyUpdates":
        self.variants.append(recipe)
        return self

    def replay(self, *, start: int = 0, batch: float | None = None) -> bool:
        self.calls.append(("replay", start, batch))
        return True

    def mix(self, *, share: float, rollouts: int) -> None:
        self.calls.append(("mix", share, rollouts))

    def keep(self, *, samples: int = 0, rollouts: int = 0) -> None:
        self.calls.append(("keep", samples, rollouts))

    def gather(self, *, tokens: int) -> None:
        self.calls.append(("gather", tokens))

    def fit_critic(self, *, draws: int, batch: int, lr: float) -> float:
        self.calls.append(("fit_critic", draws, batch, lr))
        return 0.0

    def batch(self) -> Batch:
        return self.rollout

    def now(self, rows: Tensor) -> Batch:
        return self.rollout.rows(rows)

    def add(self, **fields: Tensor) -> None:
        self.added |= fields

    def weights(self) -> list[Tensor]:
        return [self.theta.clone()]

    def load(self, weights: list[Tensor]) -> None:
        [self.theta] = weights

    def optimizer_state(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.moments = state["moments"]

    def logp(self, weights: list[Tensor]) -> Tensor:
        return self.rollout.logp + weights[0].sum()

    def exact(self) -> tuple[Any, Any]:
        raise NotImplementedError


def run(
    recipe: Recipe, toy: ToyUpdates, /, state: dict | None = None, **clock: int
) -> tuple[dict, dict]:
    """(state, metrics) of the recipe's schedule on this rollout."""
    stage = recipe.schedule
    state = (stage.init() if stage.init else {}) if state is None else state
    ctx = Context(state=state, generator=torch.Generator().manual_seed(0), clock=Clock(**clock))
    return stage.apply(toy, ctx)
