"""Several losses on a rollout, one after another: Lopti, arXiv:2505.12929."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proxpo.stages import stage
from proxpo.stages._options import check_numbers
from proxpo.stages.schedule._types import Updates
from proxpo.stages.select.probability import probability_split
from proxpo.types import Context, Metrics, Recipe, State


@dataclass(frozen=True)
class Passes:
    """A schedule that makes all updates with each of its losses in turn, and nothing else."""

    variants: Callable[[Recipe], tuple[Recipe, ...]]

    def __call__(self, updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        for recipe in self.variants(updates.recipe):
            updates.variant(recipe).step(updates.count)
        return {}, {}


@stage("schedule", needs=("old_logp",))
def split_passes(
    *,
    threshold: float = 0.5,
    rule: Literal["probability", "quantile"] = "probability",
    high_first: bool = False,
):
    """All updates with the tokens of π_old < threshold, then all with the others: Lopti.

    Each pass is the recipe with one more `select` stage, `probability_split`. rule="quantile": the
    threshold is a quantile of π_old over the optimizer step. arXiv:2505.12929.

    threshold: probability, or quantile, that separates the passes
    rule: threshold as a "probability" or a "quantile"
    high_first: start with the probable tokens
    """
    check_numbers("split_passes", "[0, 1]", threshold=threshold)
    order: tuple[Literal["low", "high"], ...] = ("high", "low") if high_first else ("low", "high")
    parts = [probability_split(threshold=threshold, part=part, rule=rule) for part in order]

    def variants(recipe: Recipe) -> tuple[Recipe, ...]:
        return tuple(recipe.replace(select=(*recipe.select, part)) for part in parts)

    return Passes(variants)


__all__ = ["Passes", "split_passes"]
