"""Schedules that only count: how many steps, on how much of the rollout."""

from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.schedules._types import Updates
from proxpo.stages import stage
from proxpo.types import Context, Metrics, State

Result = tuple[State, Metrics]


@stage("schedule")
def single_update():
    """One update on the whole rollout batch, so that the data are on-policy (OPO, ReMax)."""

    def schedule(updates: Updates, ctx: Context) -> Result:
        updates.step(1, parts=1, only=True)
        return {}, {}

    return schedule


@stage("schedule")
def inner_steps(*, steps: int = 10, on: Literal["whole", "parts"] = "whole"):
    """`steps` optimizer steps on each rollout, whatever the trainer's settings say.

    on="whole": each on the whole rollout (MDPO's m inner steps, arXiv:2005.09814). on="parts": each
    on its own share of the prompts, so that one large rollout feeds many small steps (RAPID's
    horizon H, arXiv:2510.03515).
    """
    if steps < 1:
        raise ProxpoError(f"inner_steps: steps is at least 1, got {steps}")

    def schedule(updates: Updates, ctx: Context) -> Result:
        updates.step(steps, parts=1 if on == "whole" else steps, only=True)
        return {}, {}

    return schedule


@stage("schedule")
def poisson_replay(
    *, ratio: float = 2.0, capacity: int = 50_000, start: int = 15_000, batch: float = 6.0
):
    """After each on-policy update m ~ Poisson(ratio) updates on replayed data. P3O 2019.

    `capacity` and `start` count samples in the buffer; an off-policy batch is `batch` times as
    large as the number of parallel environments (prompts here).
    """

    def schedule(updates: Updates, ctx: Context) -> Result:
        replayed = int(torch.poisson(torch.tensor(float(ratio)), generator=ctx.generator))
        updates.keep(samples=capacity)
        updates.step(updates.count, only=not replayed)
        for _ in range(replayed):
            updates.replay()
        return {}, {}

    return schedule


__all__ = ["inner_steps", "poisson_replay", "single_update"]
