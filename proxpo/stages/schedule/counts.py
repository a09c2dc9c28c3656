"""Schedules of a number of steps: on the whole rollout, on parts of it, on replayed data."""

from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.stages import Parts, stage
from proxpo.stages._options import check_numbers
from proxpo.stages.ratio import none
from proxpo.stages.regularisers import entropy_bonus
from proxpo.stages.schedule._types import Updates
from proxpo.stages.trust import score_function
from proxpo.types import Context, Metrics, Recipe, State

Result = tuple[State, Metrics]
MOST_REPLAYS = 1000  # replayed updates a rollout, on average


@stage("schedule", decides=("count", "parts"))
def single_update():
    """One update on the whole rollout batch, so that the data are on-policy (OPO, ReMax)."""

    def schedule(updates: Updates, ctx: Context) -> Result:
        updates.step(1, parts=1, only=True)
        return {}, {}

    return schedule


@stage("schedule", decides=("count", "parts"))
def inner_steps(*, steps: int = 10, on: Literal["whole", "parts"] = "whole"):
    """`steps` optimizer steps on each rollout, whatever the trainer's settings say.

    on="whole": each on the whole rollout (MDPO's m inner steps, arXiv:2005.09814). on="parts": each
    on its own share of the prompts, so that one large rollout feeds many small steps (RAPID's
    horizon H, arXiv:2510.03515).

    steps: optimizer steps on each rollout
    on: the "whole" rollout each time, or "parts" of it
    """
    if steps < 1:
        raise ProxpoError(f"inner_steps: steps is at least 1, got {steps}")

    def schedule(updates: Updates, ctx: Context) -> Result:
        updates.step(steps, parts=1 if on == "whole" else steps, only=True)
        return {}, {}

    return schedule


@dataclass(frozen=True, kw_only=True)
class PoissonReplay:
    """A schedule with m ~ Poisson(ratio) updates on replayed data after the fresh ones."""

    ratio: float
    capacity: int
    start: int
    batch: float | None
    fresh_entropy: float | None

    def __call__(self, updates: Updates, ctx: Context) -> Result:
        drawn = int(torch.poisson(torch.tensor(float(self.ratio)), generator=ctx.generator))
        updates.keep(samples=self.capacity)
        updates.variant(self.fresh(updates.recipe)).step(updates.count, only=not drawn)
        made = sum(updates.replay(start=self.start, batch=self.batch) for _ in range(drawn))
        return {}, {"schedule/replayed": torch.tensor(float(made))}

    def fresh(self, recipe: Recipe) -> Recipe:
        """The recipe for data of the current policy: without corrections for another sampler."""
        if self.fresh_entropy is None:
            return recipe
        others = [stage for stage in recipe.regularisers if not stage.name.startswith("ess_kl")]
        return recipe.replace(
            ratio=none(),
            trust=score_function(),
            regularisers=(entropy_bonus(coef=self.fresh_entropy), *others),
        )

    def variants(self, recipe: Recipe) -> tuple[Recipe, ...] | None:
        return None if self.ratio else (self.fresh(recipe),)


@stage("schedule")
def poisson_replay(
    *,
    ratio: float = 2.0,
    capacity: int = 50_000,
    start: int = 0,
    batch: float | None = None,
    fresh_entropy: float | None = None,
):
    """After each on-policy update m ~ Poisson(ratio) updates on replayed data. P3O 2019.

    The buffer holds the last `capacity` responses; there is no replay while it holds fewer than
    `start`. A replayed update takes `batch` times the prompts of a rollout, drawn from the whole
    buffer; batch=None takes one earlier rollout, whole. The released code counts frames of Atari
    games: start 15,000, and 6 times the parallel environments. fresh_entropy: on fresh data the
    loss is -Â log π - fresh_entropy·H in place of the recipe's ratio, trust and ESS penalties.

    ratio: replayed updates for each fresh one, on average
    capacity: responses that the buffer holds
    start: responses before the first replay
    batch: prompts of a replayed update, in multiples of a rollout's; none: one earlier rollout
    fresh_entropy: weight of the entropy on fresh data; none: the recipe's own loss there
    """
    if not 0 <= ratio <= MOST_REPLAYS or capacity < 1 or not 0 <= start <= capacity:
        raise ProxpoError(
            f"poisson_replay: expected ratio in [0, {MOST_REPLAYS}], capacity of at least 1 and "
            f"start in [0, capacity], got {ratio:g}, {capacity}, {start}"
        )
    check_numbers("poisson_replay", "(0, inf)", batch=batch)
    check_numbers("poisson_replay", "(-inf, inf)", fresh_entropy=fresh_entropy)
    replay = PoissonReplay(
        ratio=ratio, capacity=capacity, start=start, batch=batch, fresh_entropy=fresh_entropy
    )
    return Parts(apply=replay, needs=() if fresh_entropy is None else ("entropy",))


__all__ = ["PoissonReplay", "inner_steps", "poisson_replay", "single_update"]
