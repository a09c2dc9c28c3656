"""A second phase that leads every state back into the trust region: FixPO, arXiv:2312.05405."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.regularisers.dual import divergence_from_old
from proxpo.stages.schedule._types import Updates
from proxpo.types import Batch, Context, Metrics, Recipe, Stage, State


class Fixed(NamedTuple):
    """The result of a fix-up phase."""

    reached: bool
    steps: int
    passes: int
    kl: float


@stage("schedule", needs=("old_logp",))
def fixup(
    *,
    every: Literal["epoch", "last"] = "epoch",
    rows: int = 1024,
    max_passes: int = 100,
):
    """After each epoch, pure KL steps until every state is inside the region. arXiv:2312.05405.

    The region, its statistic and β are those of the recipe's kl_dual regulariser, whose dual step
    follows every optimizer step. The rollout is looked at `rows` responses at a time; parts that
    leave the region get one step on β·mean KL, until one whole pass finds none. After `max_passes`
    the last weights known to be inside come back, and the metrics say so.

    every: after each "epoch", or the "last" alone
    rows: responses that are looked at together
    max_passes: passes over the rollout at most
    """
    if rows < 1 or max_passes < 1:
        raise ProxpoError(f"fixup: rows and max_passes are at least 1, got {rows}, {max_passes}")

    def schedule(updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        penalty = dual_penalty(updates.recipe)
        inside, done, passes, reached = updates.weights(), 0, 0, 1.0
        for number in range(1, updates.count + 1):
            updates.step(1)
            epoch_ends = number % updates.parts == 0 and every == "epoch"
            if not (epoch_ends or number == updates.count):
                continue
            fixed = fix(updates, penalty, rows=rows, max_passes=max_passes)
            done, passes = done + fixed.steps, passes + fixed.passes
            if fixed.reached:
                inside = updates.weights()
            else:
                updates.load(inside)
                reached = 0.0
        last = largest(updates, penalty, torch.arange(len(updates.batch().mask)).split(rows))
        numbers = {"reached": reached, "steps": done, "passes": passes, "kl_max": last}
        return {}, {f"fixup/{name}": torch.tensor(float(x)) for name, x in numbers.items()}

    return schedule


def dual_penalty(recipe: Recipe) -> Stage:
    """The regulariser that holds the region and β."""
    for regulariser in recipe.regularisers:
        if regulariser.name == "kl_dual":
            return regulariser
    raise ProxpoError(
        f"{recipe.name}: schedule=fixup keeps the region of a kl_dual regulariser, which is "
        "missing: add regularisers+=kl_dual"
    )


def fix(updates: Updates, penalty: Stage, *, rows: int, max_passes: int) -> Fixed:
    """Goes over the rollout until a pass changes nothing, which certifies the region."""
    only_kl = kl_alone(updates.recipe, penalty)
    parts = torch.arange(len(updates.batch().mask)).split(rows)
    radius, steps, kl = penalty.options["radius"], 0, 0.0
    for number in range(1, max_passes + 1):
        clean = True
        for part in parts:
            kl = largest(updates, penalty, [part])
            if kl > radius:
                clean, steps = False, steps + 1
                updates.step(1, recipe=only_kl, rows=part)
        if clean:
            return Fixed(True, steps, number, kl)
    return Fixed(False, steps, max_passes, kl)


def largest(updates: Updates, penalty: Stage, parts: Iterable[Tensor]) -> float:
    """The statistic of KL(π_old‖π) that must stay in the region, the worst of the parts."""
    exact, of = penalty.options["kl"] == "exact", penalty.options["statistic"]
    statistics = (_statistic(updates.now(part), exact=exact, of=of) for part in parts)
    return max(statistics, default=0.0)


def _statistic(batch: Batch, *, exact: bool, of: str) -> float:
    kl: Float[Tensor, " some"] = divergence_from_old(batch, exact=exact)[batch.mask]
    if not kl.numel():
        return 0.0
    value = float(kl.max() if of == "max" else kl.mean())
    return value if value == value else float("inf")  # NaN is no certificate


def kl_alone(recipe: Recipe, penalty: Stage) -> Recipe:
    """The recipe with nothing but β·KL in its loss."""

    def nothing(ratio: Tensor, batch: Batch, ctx: Context) -> tuple[Tensor, Metrics]:
        return torch.zeros_like(ratio), {}

    silent = Stage(kind="trust", name="nothing", apply=nothing, gives="loss")
    return recipe.replace(trust=silent, regularisers=(penalty,), weights=(), select=(), value=None)


__all__ = ["Fixed", "fix", "fixup", "kl_alone"]
