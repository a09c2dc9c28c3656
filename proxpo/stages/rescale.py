"""Rescaling the whole gradient after the backward pass, by a second one over the same batch.

The function of a `rescale` stage is an object: `loss(ratio, batch, ctx)` is a term per token whose
aggregated gradient is the vector to be measured, `factor(norm)` what the policy gradient is
multiplied by once the norm of that vector is known. Called, it is the function of a trust stage.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch

from proxpo.compose import policy_loss
from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Metrics, Recipe, Stage


@runtime_checkable
class Rescaling(Protocol):
    """What a `rescale` stage offers."""

    def loss(
        self, ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> Float[Tensor, "seq tok"]: ...

    def factor(self, norm: float) -> float: ...

    def __call__(
        self, ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> tuple[Float[Tensor, "seq tok"], Metrics]: ...


@dataclass(frozen=True, kw_only=True)
class ClippingBias:
    """Divide by ‖C(θ)‖, C the gradient that clipping threw away. ST-PPO, arXiv:2511.20718."""

    low: float
    high: float
    norm_floor: float
    when_unclipped: str

    def loss(
        self, ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> Float[Tensor, "seq tok"]:
        """1{clipped}·w·A: its aggregated gradient is C(θ)."""
        adv = batch.require("advantages", by="rescale=clipping_bias")
        r = ratio.detach()
        clipped = ((adv > 0) & (r > 1 + self.high)) | ((adv < 0) & (r < 1 - self.low))
        return torch.where(clipped, ratio * adv, 0.0)

    def __call__(
        self, ratio: Float[Tensor, "seq tok"], batch: Batch, ctx: Context
    ) -> tuple[Float[Tensor, "seq tok"], Metrics]:
        """The same as the function of a trust stage."""
        return self.loss(ratio, batch, ctx), {}

    def factor(self, norm: float) -> float:
        """1/max(norm, norm_floor); 1 where nothing is clipped, unless told to divide by the floor.

        A norm that is not finite leaves the gradient alone too.
        """
        if not math.isfinite(norm) or (norm == 0 and self.when_unclipped == "identity"):
            return 1.0
        return 1 / max(norm, self.norm_floor)


@stage("rescale", takes=("ratio",))
def clipping_bias(
    *,
    low: float = 0.2,
    high: float = 0.2,
    norm_floor: float = 0.0,
    when_unclipped: Literal["identity", "floor"] = "identity",
):
    """g = ∇J/max(‖C(θ)‖₂, floor), C(θ) = ∇E[1{clipped}·w·A], C detached. arXiv:2511.20718.

    Reconstructed from the abstract and public reviews. floor=0 is the literal division, which
    amplifies where ‖C‖ < 1; floor=1 never does. Nothing clipped: the gradient stays as it is, or is
    divided by the floor (when_unclipped="floor").
    """
    if low < 0 or high < 0:
        raise ProxpoError(f"clipping_bias: the clip range must not be negative, got {low}, {high}")
    if not 0 <= norm_floor < math.inf or (when_unclipped == "floor" and not norm_floor):
        raise ProxpoError(
            f"clipping_bias: norm_floor must be finite, not negative, and positive where nothing "
            f"clipped divides by it, got {norm_floor}"
        )
    return ClippingBias(low=low, high=high, norm_floor=norm_floor, when_unclipped=when_unclipped)


def rescaling_of(recipe: Recipe) -> Rescaling:
    """The object behind the recipe's rescale stage."""
    if recipe.rescale is None:
        raise ProxpoError(f"{recipe.name or 'recipe'}: there is no rescale stage")
    return cast(Rescaling, recipe.rescale.apply)


def measured_loss(recipe: Recipe, batch: Batch, ctx: Context) -> Float[Tensor, ""]:
    """The scalar whose gradient a rescale stage measures: the recipe with its term for the trust.

    Takes a prepared batch, or a cut of one, and the context of `policy_loss`; cuts add up.
    """
    term = rescaling_of(recipe)
    trust = Stage(kind="trust", name="measured", apply=term, takes=("ratio",), gives="loss")
    bare = recipe.replace(trust=trust, regularisers=(), value=None)
    return policy_loss(bare, batch, ctx).value


def logp_norm(recipe: Recipe, batch: Batch, ctx: Context) -> Float[Tensor, ""]:
    """A proxy where no model is at hand: the norm of ∂C/∂log π over tokens, not over parameters."""
    logp = batch.logp.detach().requires_grad_()
    value = measured_loss(recipe, batch.replace(logp=logp), ctx)
    if not value.requires_grad:
        return torch.zeros_like(value)
    found = torch.autograd.grad(value, logp, allow_unused=True)[0]
    return torch.zeros_like(value) if found is None else found.norm()


__all__ = [
    "ClippingBias",
    "Rescaling",
    "clipping_bias",
    "logp_norm",
    "measured_loss",
    "rescaling_of",
]
