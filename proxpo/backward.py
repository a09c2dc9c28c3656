"""The backward pass of one micro-batch, with or without a gradient transform, for any loop.

A transform takes the gradient of a sum of log-probabilities, and the advantages apart. For a policy
term L that sum is Σ u_it · log π(o_it) with u_it = -(∂L/∂log π_it)/A_i, held constant: 1 for
REINFORCE, the ratio for an unclipped surrogate, 0 where a clip acts. So KPO's ratio with ISOPO's
gradient and OPO's baseline is a setting.

The other terms of a loss (regularisers, the critic's) carry no advantage: they are the whole loss
minus its policy term, and get an ordinary forward and backward pass of their own before the
transform's.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from proxpo.compose import as_tokens, policy_loss
from proxpo.errors import ProxpoError
from proxpo.fields import find_field
from proxpo.ops.masked import row_mean
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.sums import microbatch_sums
from proxpo.types import AllSum, Batch, Context, Loss, Reach, Recipe

ForwardPass = Callable[[], Tensor | Mapping[str, Tensor]]


class BackwardPass(NamedTuple):
    """A micro-batch inside its backward pass.

    objective: the scalar to back-propagate before the block ends
    loss: value and metrics of the recipe on this micro-batch
    fields: batch fields that `forward` computed for `objective`
    """

    objective: Float[Tensor, ""]
    loss: Loss
    fields: Mapping[str, Tensor]


@contextmanager
def backward_pass(
    recipe: Recipe,
    batch: Batch,
    ctx: Context,
    *,
    forward: ForwardPass,
    applied: Callable[..., AbstractContextManager[Any]] | None = None,
    forward_rest: ForwardPass | None = None,
    policy_sum: AllSum | None = None,
    ranks: int = 1,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Iterator[BackwardPass]:
    """Opens the backward pass of a prepared micro-batch; the caller back-propagates `objective`.

        batch, ctx, _ = proxpo.prepare(recipe, batch)
        forward = partial(proxpo.model_logp, model, ids, batch.mask)
        applied = partial(transform.applied, model, sequences=rows)   # None without a transform
        with backward_pass(recipe, batch, ctx, forward=forward, applied=applied) as step:
            step.objective.backward()

    forward: runs the policy with gradient; returns `logp`, or all batch fields that it computes.
    applied: `Transform.applied` with all its arguments but `advantages`; None for a recipe without
        a gradient stage.
    forward_rest: the same as `forward` for the terms without an advantage, if they read more.
    policy_sum: `all_sum` for the policy term alone, where `ctx.all_sum` replays sums of the whole
        loss (`sums_over_step`).
    ranks: processes over which the engine averages gradients that are to be added.
    backward: back-propagates the terms without an advantage, for engines that do it themselves.
    """
    if applied is None:
        if recipe.gradient is not None and torch.is_grad_enabled():
            raise ProxpoError(
                f"{recipe.name}: gradient={_transform(recipe)} acts in the backward pass, so this "
                "needs applied=partial(transform.applied, model, ...) with transform = "
                "recipe.gradient.apply(); recipe.replace(gradient=None) trains without"
            )
        fields = _computed(forward)
        _check_computed(recipe, fields, ctx)
        loss = policy_loss(recipe, batch.replace(**fields), ctx)
        yield BackwardPass(ranks * loss.value, loss, fields)
        return
    policy_ctx = ctx if policy_sum is None else replace(ctx, all_sum=policy_sum)
    whole = None
    if policy_term(recipe) != recipe:
        computed = _computed(forward_rest or forward)
        _check_computed(recipe, computed, ctx)
        present = batch.replace(**computed)
        whole, rest = without_policy_term(recipe, present, ctx, policy_ctx)
        backward(ranks * rest)
    with applied(advantages=ranks * advantages_per_response(recipe, batch)):
        fields = _computed(forward)
        _check_computed(policy_term(recipe), fields, ctx)
        weights, _, loss = objective(recipe, batch.replace(**fields), policy_ctx)
        if whole is not None:
            loss = Loss(whole.value, whole.metrics | loss.metrics)
        logp = torch.where(batch.mask, fields["logp"], 0.0)  # masked ones may hold anything
        yield BackwardPass(-(weights * logp).sum(), loss, fields)


class Objective(NamedTuple):
    """A loss as -Σ weights·logp to descend inside `applied(..., advantages=advantages)`."""

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
    others = {
        name: x.detach().requires_grad_()
        for name, x in batch.items()
        if name != "logp" and find_field(name).source == "policy" and x.is_floating_point()
    }
    averaged: list[Tensor] = []

    def average(x: Tensor, batch: Batch, ctx: Context) -> Any:
        averaged.append(x)
        return recipe.aggregate.apply(x, batch, ctx)

    loss = policy_loss(
        policy_term(recipe).replace(
            aggregate=replace(recipe.aggregate, apply=average), gradient=None
        ),
        batch.replace(logp=logp, **others),
        ctx,
    )
    _check_through_logp(recipe, loss.value, others)
    slope, share = torch.autograd.grad(loss.value, [logp, averaged[0]])
    advantages = advantages_per_response(recipe, batch)[:, None]
    if bool((batch.mask & (advantages == 0) & (slope != 0)).any()):
        raise ProxpoError(
            f"{recipe.name}: gradient={_transform(recipe)} needs a loss proportional to the "
            "advantage, but responses with advantage 0 have a gradient"
        )
    weights = torch.where(
        advantages == 0, share, -slope / torch.where(advantages == 0, 1.0, advantages)
    )
    return Objective(torch.where(batch.mask, weights, 0.0), advantages[:, 0], loss)


def _check_through_logp(recipe: Recipe, value: Tensor, others: Mapping[str, Tensor]) -> None:
    """Refuses a policy term with a gradient through other fields than `logp`: it would be lost."""
    if not others:
        return
    gradients = torch.autograd.grad(
        value, list(others.values()), allow_unused=True, retain_graph=True
    )
    for name, gradient in zip(others, gradients):
        if gradient is not None:
            raise ProxpoError(
                f"{recipe.name}: gradient={_transform(recipe)} takes the gradient of "
                f"log-probabilities alone, but this loss has one through '{name}' as well"
            )


def advantages_per_response(recipe: Recipe, batch: Batch) -> Float[Tensor, " seq"]:
    """The advantage of each response; refuses several inside a response."""
    advantages = as_tokens(batch.require("advantages", by="a gradient transform"), batch)
    rows = row_mean(advantages, batch.mask)
    spread = torch.where(batch.mask, advantages - rows[:, None], 0.0).abs()
    if bool((spread > 1e-6 * (1 + rows.abs()[:, None])).any()):
        raise ProxpoError(
            f"{recipe.name}: gradient={_transform(recipe)} needs one advantage per response, but "
            "the advantages differ inside a response"
        )
    return rows


def _transform(recipe: Recipe) -> str:
    return recipe.gradient.name if recipe.gradient else "none"


def policy_term(recipe: Recipe) -> Recipe:
    """The recipe without the terms that carry no advantage."""
    return recipe.replace(regularisers=(), value=None)


def without_policy_term(
    recipe: Recipe, batch: Batch, ctx: Context, policy_ctx: Context | None = None
) -> tuple[Loss, Float[Tensor, ""]]:
    """The loss, and the part of it that carries no advantage: regularisers and the critic's term.

    policy_ctx: for the policy term, where its sums are others. Random draws are the same in both,
    and `ctx.generator` stays as it is.
    """
    plain = recipe.replace(gradient=None)
    whole = policy_loss(plain, batch, _same_draws(ctx))
    policy = policy_loss(policy_term(plain), batch, _same_draws(policy_ctx or ctx))
    return whole, whole.value - policy.value


def _computed(forward: ForwardPass) -> Mapping[str, Tensor]:
    result = forward()
    return {"logp": result} if isinstance(result, Tensor) else result


def _check_computed(recipe: Recipe, fields: Collection[str], ctx: Context) -> None:
    """Refuses a term of a field that the forward pass left out: it would have no gradient."""
    critic = [recipe.value] if recipe.value else []
    for stage in (recipe.ratio, *recipe.regularisers, *critic):
        for name in stage.needs if stage.active(ctx.clock) else ():
            if find_field(name).source == "policy" and name not in fields:
                raise ProxpoError(
                    f"{recipe.name}: {stage.kind}={stage.name} needs '{name}' from the forward "
                    "pass, which did not return it"
                )


def _same_draws(ctx: Context) -> Context:
    """The context with a copy of its generator."""
    if ctx.generator is None:
        return ctx
    copy = torch.Generator(device=ctx.generator.device)
    copy.set_state(ctx.generator.get_state())
    return replace(ctx, generator=copy)


def sums_over_step(
    recipe: Recipe,
    sample: Batch,
    ctx: Context,
    *,
    microbatches: Callable[[], Sequence[Batch]],
    scopes: Collection[Reach] = ("batch", "rank"),
) -> AllSum:
    """`all_sum` for the micro-batches of an optimizer step; `ctx.all_sum` if that is enough.

    sample: any of the micro-batches, or all in one; numbers of the forward pass may be made up.
    microbatches: runs the policy without gradient and returns all micro-batches; called only for a
        recipe that takes sums over them.
    scopes: sums that a single micro-batch cannot answer; without "rank" each holds whole groups.
    """
    if not asks_for_sums(recipe, sample, ctx, scopes=scopes):
        return ctx.all_sum

    plain = recipe.replace(gradient=None)

    def loss(batch: Batch, *, all_sum: AllSum) -> Loss:
        return policy_loss(plain, batch, replace(ctx, all_sum=all_sum))

    return microbatch_sums(loss, microbatches(), ranks=ctx.all_sum, verify=False)


@torch.no_grad()
def asks_for_sums(
    recipe: Recipe,
    sample: Batch,
    ctx: Context,
    *,
    scopes: Collection[Reach] = ("batch", "rank"),
) -> bool:
    """True if the recipe's loss takes sums of these scopes, found by computing it on a sample."""
    asked: set[Reach] = set()

    def record(x: Tensor, scope: Reach = "batch") -> Tensor:
        asked.add(scope)
        return x

    policy_loss(recipe, sample, replace(ctx, all_sum=record))
    return not asked.isdisjoint(scopes)


__all__ = [
    "BackwardPass",
    "Objective",
    "advantages_per_response",
    "asks_for_sums",
    "backward_pass",
    "objective",
    "policy_term",
    "sums_over_step",
    "without_policy_term",
]
