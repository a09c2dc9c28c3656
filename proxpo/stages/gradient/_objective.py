"""Gradient stages, and the objective that a recipe's loss gives to a gradient transform.

A transform wants the gradient of a sum of log-probabilities, and the advantages apart. For a loss L
that sum is Σ u_it · log π(o_it) with u_it = -(∂L/∂log π_it)/A_i, held constant: 1 for
REINFORCE, the ratio for an unclipped surrogate, 0 where a clip acts. So KPO's ratio with ISOPO's
gradient and OPO's baseline is a setting.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from proxpo.compose import policy_loss
from proxpo.errors import ProxpoError
from proxpo.gradients import isopo, isopo_ntk
from proxpo.gradients.proma import proma
from proxpo.ops.masked import row_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import stage
from proxpo.types import Batch, Context, Loss, Recipe


def _gradient_stage(factory: Callable[..., Any]) -> None:
    """Registers a transform as a `gradient` stage, whose function makes a fresh transform."""

    @functools.wraps(factory)
    def configured(**options: Any) -> Callable[[], Any]:
        factory(**options)  # refuses wrong options where they are given
        return functools.partial(factory, **options)

    stage("gradient")(configured)


for _factory in (isopo, isopo_ntk, proma):
    _gradient_stage(_factory)


class Objective(NamedTuple):
    """Weights and advantages of a transformed backward.

    Descend -Σ weights·logp inside `transform.applied(..., advantages=advantages)`.
    """

    weights: Float[Tensor, "seq tok"]
    advantages: Float[Tensor, " seq"]
    loss: Loss


def objective(recipe: Recipe, batch: Batch, ctx: Context) -> Objective:
    """The recipe's policy term on a prepared batch, taken apart for a gradient transform.

    Responses with advantage 0 get the weight of a token in the recipe's average, so that they
    still take part in a transform's statistics. Regularisers and the critic are left out: they
    carry no advantage and want a backward pass of their own.
    """
    logp = batch.logp.detach().requires_grad_()
    averaged: list[Tensor] = []

    def average(x: Tensor, batch: Batch, ctx: Context) -> Any:
        averaged.append(x)
        return recipe.aggregate.apply(x, batch, ctx)

    loss = policy_loss(
        recipe.replace(
            regularisers=(), value=None, aggregate=replace(recipe.aggregate, apply=average)
        ),
        batch.replace(logp=logp),
        ctx,
    )
    slope, share = torch.autograd.grad(loss.value, [logp, averaged[0]])
    advantages = per_response(recipe, batch)[:, None]
    weights = torch.where(
        advantages == 0, share, -slope / torch.where(advantages == 0, 1.0, advantages)
    )
    return Objective(torch.where(batch.mask, weights, 0.0), advantages[:, 0], loss)


def per_response(recipe: Recipe, batch: Batch) -> Float[Tensor, " seq"]:
    """The one advantage of each response; a transform cannot work with several."""
    rows = row_mean(batch.advantages, batch.mask)
    spread = torch.where(batch.mask, batch.advantages - rows[:, None], 0.0).abs()
    if bool((spread > 1e-6 * (1 + rows.abs()[:, None])).any()):
        name = recipe.gradient.name if recipe.gradient else "none"
        raise ProxpoError(
            f"{recipe.name}: gradient={name} needs one advantage per response, but the advantages "
            "differ inside a response"
        )
    return rows


__all__ = ["Objective", "objective", "per_response"]
