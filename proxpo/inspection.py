"""Inspection of a method on a batch: loss, gradient on every token, advantages and metrics."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from proxpo.compose import Prepared, left_out, makes_targets, policy_loss, prepare
from proxpo.ops.kl import kl_estimate
from proxpo.ops.masked import masked_mean
from proxpo.ops.metering import logged
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.stages.schedule.clipping_bias import ClippingBias, clipping_bias_of
from proxpo.stages.trust.ess import ess
from proxpo.types import Batch, Context, Loss, Recipe


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One method on one batch. `mask` is what its filters left; gradients are 0 elsewhere."""

    method: str
    recipe: Recipe
    loss: float
    dloss_dlogp: Float[Tensor, "seq tok"]
    advantages: Float[Tensor, "seq tok"] | Float[Tensor, " seq"]
    mask: Bool[Tensor, "seq tok"]
    metrics: dict[str, float]

    @property
    def notes(self) -> list[str]:
        """Parts of the method that the numbers leave out, and lengths that a trainer would set."""
        after = ("gradient", "schedule")
        parts = [
            f"shown {'before' if place in after else 'without'} {what}"
            for place, what in left_out(self.recipe).items()
        ]
        for place, stage in self.recipe.stages():
            if stage.length is not None and stage.options["max_tokens"] is None:
                key = f"{place}.max_tokens"
                parts.append(f"shown with {key}={stage.length:g}, where a trainer takes its limit")
        return parts

    @property
    def mass(self) -> Float[Tensor, " seq"]:
        """Σ_t |∂L/∂log π| per response: its share in the update."""
        return self.dloss_dlogp.abs().sum(dim=1)

    @property
    def push(self) -> Float[Tensor, " seq"]:
        """-Σ_t ∂L/∂log π per response: above 0, a step makes the response likelier."""
        return -self.dloss_dlogp.sum(dim=1)


def inspect_batch(recipe: Recipe, batch: Batch, *, name: str = "", seed: int = 0) -> Inspection:
    """Runs `recipe` on the whole batch in float64. Random stages draw from `seed`.

    `advantages` has the shape of those in the batch. Where the recipe computed them it has one
    value per response if all valid tokens of each response share it, else a value per token.
    Responses that a prune stage takes out afterwards keep theirs; their gradient is 0.
    """
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    logp = doubled.pop("logp").detach().clone().requires_grad_()
    whole = Batch(logp=logp, **doubled)

    def context() -> Context:
        generator = torch.Generator().manual_seed(seed)
        return Context(generator=generator, states=recipe.init_state())

    ready, (loss, loss_metrics), gradient = token_gradient(recipe, whole, context())
    unpruned = recipe.replace(prune=())
    rated = prepare(unpruned, whole, context()).batch if recipe.prune else ready.batch
    shown = logged({**ready.metrics, **loss_metrics})
    metrics = {key: float(value) for key, value in shown.items()}
    return Inspection(
        method=name or recipe.name,
        recipe=recipe,
        loss=float(loss.detach()),
        dloss_dlogp=gradient,
        advantages=_advantages_shown(rated, batch.advantages),
        mask=ready.batch.mask,
        metrics=metrics | _measured(recipe, ready, gradient),
    )


def without_effect(recipe: Recipe, usual: Recipe, batch: Batch) -> list[str]:
    """Stages that differ from the usual recipe's, and that the batch's own advantages replace."""
    if batch.advantages is None:
        return []
    kinds = ("advantage",) if makes_targets(recipe, batch) else ("reward", "advantage")
    changed = [kind for kind in kinds if getattr(recipe, kind) != getattr(usual, kind)]
    stages = {kind: [str(s) for _, s in recipe.stages() if s.kind == kind] for kind in changed}
    return [
        f"{kind}={', '.join(shown) or 'none'} has no effect: the advantages are the batch's own"
        for kind, shown in stages.items()
    ]


class TokenGradient(NamedTuple):
    """A batch as `prepare` left it, its loss, and ∂loss/∂log π of every token."""

    ready: Prepared
    loss: Loss
    gradient: Float[Tensor, "seq tok"]


def token_gradient(recipe: Recipe, batch: Batch, ctx: Context) -> TokenGradient:
    """∂loss/∂`batch.logp`, which requires a gradient; 0 at masked positions.

    Other fields may depend on `logp`; the gradient through them is part of it.
    """
    ready = prepare(recipe, batch, ctx)
    loss = policy_loss(recipe, ready.batch, ready.ctx)
    gradient = torch.zeros_like(batch.logp)
    if loss.value.requires_grad:
        slope = torch.autograd.grad(loss.value, batch.logp, allow_unused=True)[0]
        gradient = gradient if slope is None else slope.masked_fill(~batch.mask, 0.0)
    return TokenGradient(ready, loss, gradient)


def as_json(inspection: Inspection) -> dict[str, Any]:
    """The method's entry in `proxpo inspect --json`; what is not finite is null.

    `notes` is there only for methods of which the numbers do not show everything.
    """
    entry = {
        "loss": _finite(inspection.loss),
        "dloss_dlogp": _finite(inspection.dloss_dlogp.tolist()),
        "advantages": _finite(inspection.advantages.tolist()),
        "metrics": _finite(inspection.metrics),
    }
    return entry | ({"notes": inspection.notes} if inspection.notes else {})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if math.isfinite(value) else None


def _advantages_shown(batch: Batch, original: Tensor | None) -> Tensor:
    """The prepared advantages, per response if the original ones are or might have been."""
    advantages = _advantages(batch)
    top = torch.where(batch.mask, advantages, -torch.inf).amax(dim=1)
    bottom = torch.where(batch.mask, advantages, torch.inf).amin(dim=1)
    per_response = bool((top <= bottom).all()) if original is None else original.dim() == 1
    return torch.where(batch.mask.any(dim=1), top, 0.0) if per_response else advantages


def _advantages(batch: Batch) -> Tensor:
    return batch.require("advantages", by="inspection")  # prepare() has filled them in


def _measured(recipe: Recipe, ready: Prepared, gradient: Tensor) -> dict[str, float]:
    """Figures every method has, so that they can be compared, under `inspect/`."""
    batch, mask = ready.batch, ready.batch.mask
    measured = {
        "mass": gradient.abs().sum(),
        "silent": masked_mean(gradient == 0, mask),
        "advantage": masked_mean(_advantages(batch).abs(), mask),
    }
    bias = clipping_bias_of(recipe)
    if bias is not None:  # over tokens in place of parameters: there is no model
        norm = _bias_norm(bias, recipe, ready)
        measured["rescale_norm_logp"] = norm
        measured["rescale_factor_logp"] = norm.new_tensor(bias.factor(float(norm)))
    with torch.no_grad():
        if recipe.ratio.gives == "ratio":
            state = recipe.init_state().get("ratio", {})
            ratio, _ = recipe.ratio.apply(batch, replace(ready.ctx, state=state))
            measured["ess"] = ess(ratio, mask, eps=0.0)
        if batch.old_logp is not None:
            # The tokens were drawn from the old policy, so this direction is the unbiased one.
            measured["kl_old"] = masked_mean(kl_estimate(batch.old_logp, batch.logp), mask)
    return {f"inspect/{key}": float(value) for key, value in measured.items()}


def _bias_norm(bias: ClippingBias, recipe: Recipe, ready: Prepared) -> Float[Tensor, ""]:
    """‖∂C/∂log π‖ over tokens: a proxy for the norm over parameters where no model is at hand."""
    logp = ready.batch.logp.detach().requires_grad_()
    value = policy_loss(bias.measured(recipe), ready.batch.replace(logp=logp), ready.ctx).value
    if not value.requires_grad:
        return torch.zeros_like(value)
    slope = torch.autograd.grad(value, logp, allow_unused=True)[0]
    return torch.zeros_like(value) if slope is None else slope.norm()


__all__ = [
    "Inspection",
    "TokenGradient",
    "as_json",
    "inspect_batch",
    "token_gradient",
    "without_effect",
]
