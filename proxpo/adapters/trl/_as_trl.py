"""Terms of a recipe in the form that TRL gives them, where GRPOConfig asks for them by its names.

A recipe averages an entropy bonus as its loss; TRL's `entropy_coef` is a mean over the tokens of a
micro-batch, whatever the loss. VESPO's ratio is that of a whole response; the one by which TRL
corrects its KL term (`beta`) is that of a token. And TRL counts tokens of the generation batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from proxpo.adapters.trl._arguments import loss_types
from proxpo.ops.shapes import Float, Tensor
from proxpo.stages import ratio as ratios
from proxpo.types import Batch, Context, PerToken, Recipe, Stage

BY_GENERATION = ("cispo", "dapo", "vespo")  # loss types that count a generation batch's tokens


def as_trl(recipe: Recipe, args: Any, *, parts: Callable[[], int]) -> Recipe:
    """The recipe with its bonus and its KL term as in TRL, where `args` have them.

    parts: micro-batches of an optimizer step, of all processes
    """
    named = {"entropy_bonus": bool(args.entropy_coef), "kl_to_ref": bool(args.beta)}
    terms = [
        _changed(stage, recipe, args, parts) if named.get(stage.name) else stage
        for stage in recipe.regularisers
    ]
    return recipe.replace(regularisers=tuple(terms))


def _changed(stage: Stage, recipe: Recipe, args: Any, parts: Callable[[], int]) -> Stage:
    def bonus(ratio: Tensor, batch: Batch, ctx: Context) -> PerToken:
        penalty, metrics = stage.apply(ratio, batch, ctx)
        share = 1 / (parts() * batch.mask.sum().clamp(min=1))
        own = token_weights(recipe.aggregate, batch, ctx)
        return penalty * torch.where(batch.mask & (own > 0), share / own, 0.0), metrics

    def kl(ratio: Tensor, batch: Batch, ctx: Context) -> PerToken:
        of_trl, _ = trl_ratio.apply(batch, ctx)
        return stage.apply(of_trl, batch, ctx)

    if stage.name == "entropy_bonus":
        return replace(stage, apply=bonus)
    if recipe.trust.name != "gamma_weight" or not stage.options["ratio_corrected"]:
        return stage
    trl_ratio = getattr(ratios, args.importance_sampling_level)()
    return replace(stage, apply=kl)


def token_weights(aggregate: Stage, batch: Batch, ctx: Context) -> Float[Tensor, "seq tok"]:
    """The weight of each token in an average, ∂L/∂x."""
    with torch.enable_grad():
        x = torch.zeros_like(batch.logp, requires_grad=True)
        value, _ = aggregate.apply(x, batch, ctx)
        return torch.autograd.grad(value, x)[0]


def counts_generation(recipe: Recipe, args: Any) -> bool:
    """True if TRL divides this loss by its share of the generation batch's tokens."""
    return args.loss_type in BY_GENERATION and args.loss_type in loss_types(recipe)


__all__ = ["as_trl", "counts_generation"]
