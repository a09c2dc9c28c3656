"""A gradient divided by the norm of what clipping removed from it: ST-PPO, arXiv:2511.20718."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.stages.schedule._types import Rescale, Updates
from proxpo.types import Batch, Context, Metrics, Recipe, Stage, State


@dataclass(frozen=True, kw_only=True)
class ClippingBias:
    """A schedule that divides every gradient by ‖C(θ)‖, C the gradient that clipping removed."""

    low: float
    high: float
    norm_floor: float
    when_unclipped: str

    def __call__(self, updates: Updates, ctx: Context) -> tuple[State, Metrics]:
        rescale = Rescale(self.measured(updates.recipe), self.factor)
        updates.step(updates.count, only=True, rescale=rescale)
        return {}, {}

    def measured(self, recipe: Recipe) -> Recipe:
        """The recipe with 1{clipped}·w·A as its only term: its gradient is C(θ)."""
        trust = Stage(
            kind="trust", name="measured", apply=self.term, takes=("ratio",), gives="loss"
        )
        return recipe.replace(trust=trust, regularisers=(), value=None)

    def term(
        self, ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> tuple[Float[Tensor, "seq tok"], Metrics]:
        """1{clipped}·w·A for each token."""
        adv = batch.require("advantages", by="schedule=clipping_bias")
        r = ratio.detach()
        clipped = ((adv > 0) & (r > 1 + self.high)) | ((adv < 0) & (r < 1 - self.low))
        return torch.where(clipped, ratio * adv, 0.0), {}

    def factor(self, norm: float) -> float:
        """1/max(norm, norm_floor); 1 if nothing is clipped, unless when_unclipped is "floor".

        A norm that is not finite leaves the gradient alone too.
        """
        if not math.isfinite(norm) or (norm == 0 and self.when_unclipped == "identity"):
            return 1.0
        return 1 / max(norm, self.norm_floor)


@stage("schedule", takes=("ratio",))
def clipping_bias(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    norm_floor: float = 0.0,
    when_unclipped: Literal["identity", "floor"] = "identity",
):
    """g = ∇J/max(‖C(θ)‖₂, floor), C(θ) = ∇E[1{clipped}·w·A], C detached. arXiv:2511.20718.

    Reconstructed from the abstract and public reviews. floor=0 is the literal division, which
    amplifies where ‖C‖ < 1; floor=1 never does. Nothing clipped: the gradient stays as it is, or is
    divided by the floor (when_unclipped="floor"). A critic's gradient is left alone.
    """
    low, high = clip_low, clip_high
    if low < 0 or high < 0:
        raise ProxpoError(f"clipping_bias: the clip range must not be negative, got {low}, {high}")
    if not 0 <= norm_floor < math.inf or (when_unclipped == "floor" and not norm_floor):
        raise ProxpoError(
            f"clipping_bias: norm_floor must be finite, not negative, and positive where nothing "
            f"clipped divides by it, got {norm_floor}"
        )
    return ClippingBias(low=low, high=high, norm_floor=norm_floor, when_unclipped=when_unclipped)


def clipping_bias_of(recipe: Recipe) -> ClippingBias | None:
    """The recipe's schedule if it divides by the clipping bias."""
    schedule = recipe.schedule.apply if recipe.schedule is not None else None
    return schedule if isinstance(schedule, ClippingBias) else None


__all__ = ["ClippingBias", "clipping_bias", "clipping_bias_of"]
