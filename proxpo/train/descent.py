"""The update on a mini-batch: one backward pass, micro-batch by micro-batch."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from proxpo.compose import count, policy_loss
from proxpo.ops.metering import combined
from proxpo.ops.shapes import Tensor
from proxpo.ops.sums import over_microbatches
from proxpo.stages.gradient import objective, per_response
from proxpo.stages.schedule import Rescale
from proxpo.train.experience import Experience
from proxpo.train.learner import (
    VOCABULARY,
    Learner,
    Pass,
    cuts,
    forward,
    score,
    vocabulary,
    widened,
)
from proxpo.types import FIELDS, AllSum, Batch, Clock, Context, Loss, Metrics, Reach, Recipe, local


class Descent(NamedTuple):
    """What a backward pass saw: its metrics, and the rows with the numbers it was made from."""

    metrics: Metrics
    batch: Batch


def gradients(
    learner: Learner,
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    *,
    how: Pass,
    seed: int,
    clock: Clock = Clock(),
    rescale: Rescale | None = None,
) -> Descent:
    """Backward of one mini-batch, micro-batch by micro-batch; the metrics of the whole.

    `batch` holds what is fixed for the rollout; the micro-batches share its denominators, so they
    add up to the gradient of the mini-batch in one piece. Responses without a token to train on
    count in the denominators and cost nothing. Of the policy's present numbers the batch handed
    back has those that a stage reads after the step.
    """
    ctx = Context(denominators=count(batch), states=learner.state, clock=clock)
    rows, batch = _filled(recipe, rows, batch)
    batch = _narrow(batch, rows.mask.shape[1])
    parts = list(cuts(len(batch.mask), how.micro_batch, batch.mask.device))
    sums = partial(_sums, learner, rows=rows, batch=batch, parts=parts, how=how, ctx=ctx)
    apart = sums(recipe)
    ctx = replace(ctx, all_sum=apart)
    if learner.transform is not None and _bare(recipe) != recipe:
        apart = sums(_bare(recipe))  # it asks for other sums, in another order
    share = [float(batch.mask[part].sum()) for part in parts]
    totals: Metrics = {}
    present: list[dict[str, Tensor]] = []
    for number, part in enumerate(parts):
        own = replace(ctx, generator=_draws(seed, number))
        loss, now = _backward(learner, recipe, rows.rows(part), batch.rows(part), how, own, apart)
        present.append(_followed(recipe, now, batch.mask.shape[1]))
        weight = share[number] / max(sum(share), 1.0)
        seen = {**loss.metrics, "loss": loss.value}
        totals = combined(recipe, totals, seen, share=weight)
    if rescale is not None:
        totals |= _rescaled(learner, rescale, rows, batch, parts, how, ctx, seed)
    joined = {name: torch.cat([one[name] for one in present]) for name in present[0]}
    return Descent(totals, batch.replace(**joined).clean(*joined) if joined else batch)


def _followed(recipe: Recipe, now: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """The policy's present numbers that a stage reads after the step, padded to this width."""
    read = {name for _, one in recipe.stages() if one.step is not None for name in one.needs}
    return {name: widened(now[name].detach(), width) for name in now.keys() & read}


def _draws(seed: int, number: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed((seed + number) % 2**63)


def _filled(recipe: Recipe, rows: Experience, batch: Batch) -> tuple[Experience, Batch]:
    """The responses with a token to train on; all of them where they are compared with others."""
    filled = batch.mask.any(dim=1)
    compared = recipe.trust.gives == "log_ratio" or (recipe.advantage and recipe.advantage.live)
    if compared or bool(filled.all()):
        return rows, batch
    index = filled.nonzero()[:, 0] if bool(filled.any()) else filled.nonzero().new_zeros(1)
    return rows.rows(index), batch.rows(index)


def _rescaled(
    learner: Learner,
    rescale: Rescale,
    rows: Experience,
    batch: Batch,
    parts: list[Tensor],
    how: Pass,
    ctx: Context,
    seed: int,
) -> Metrics:
    """Measures the gradient of `rescale.loss` in a second pass and scales the policy's gradient."""
    trained = [p for p in learner.policy.model.parameters() if p.requires_grad]
    found = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    for number, part in enumerate(parts):
        cut = rows.rows(part)
        narrow = _narrow(batch.rows(part), cut.mask.shape[1])
        now = narrow.replace(**forward(learner, cut, how=how))
        own = replace(ctx, generator=_draws(seed, number))
        value = policy_loss(rescale.loss, now, own).value
        if value.requires_grad:
            value.backward()
    squares = [p.grad.double().square().sum() for p in trained if p.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    factor = rescale.factor(norm)
    for p, grad in zip(trained, found):
        p.grad = None if grad is None else grad.mul_(factor)
    seen = {"rescale/norm": norm, "rescale/factor": factor}
    return {name: torch.tensor(value) for name, value in seen.items()}


def _backward(
    learner: Learner,
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    how: Pass,
    ctx: Context,
    apart: AllSum,
) -> tuple[Loss, dict[str, Tensor]]:
    """The loss, and what the forward pass brought.

    `apart` adds over micro-batches for the policy term alone, as a transform sees it.
    """
    narrow = _narrow(batch, rows.mask.shape[1])
    if learner.transform is None:
        found = forward(learner, rows, how=how)
        loss = policy_loss(recipe, narrow.replace(**found), ctx)
        loss.value.backward()
        return loss, found
    bare, alone = _bare(recipe), replace(ctx, all_sum=apart)
    whole = None
    if bare != recipe:
        # Terms without an advantage: an ordinary backward of their own.
        now = narrow.replace(**forward(learner, rows, how=how))
        whole = policy_loss(recipe, now, ctx)
        (whole.value - policy_loss(bare, now, alone).value).backward()
    aside = _vocabulary(learner, rows, how)
    sequences = torch.where(
        rows.attention_mask, torch.arange(len(rows.mask), device=rows.mask.device)[:, None], -1
    )
    advantages = per_response(recipe, narrow)
    with learner.transform.applied(
        learner.policy.model, sequences=sequences, advantages=advantages, groups=rows.group
    ):
        found = forward(learner, rows, how=how, without=VOCABULARY) | aside
        split = objective(recipe, narrow.replace(**found), alone)
        (-(split.weights * found["logp"]).sum()).backward()
    if whole is None:
        return split.loss, found
    return Loss(whole.value, whole.metrics | split.loss.metrics), found


@torch.no_grad()
def _vocabulary(learner: Learner, rows: Experience, how: Pass) -> dict[str, Tensor]:
    """The whole vocabulary's log-probabilities, if anybody reads them.

    In a pass of its own: a transform sees each layer once, and the policy term moves `logp` alone.
    """
    if not learner.recipe.needs() & VOCABULARY:
        return {}
    with learner.policy.autocast():
        return {"vocab_logp": vocabulary(learner.policy.model, rows, None, how)}


def _bare(recipe: Recipe) -> Recipe:
    """The policy term alone: what carries an advantage."""
    return recipe.replace(regularisers=(), value=None)


def _sums(
    learner: Learner,
    recipe: Recipe,
    *,
    rows: Experience,
    batch: Batch,
    parts: list[Tensor],
    how: Pass,
    ctx: Context,
) -> AllSum:
    """Statistics over all micro-batches, for recipes that ask for any; else nothing to do."""
    asked: list[Tensor] = []

    def probe(x: Tensor, scope: Reach = "batch") -> Tensor:
        asked.append(x)
        return x

    if len(parts) > 1:
        policy_loss(recipe, batch, replace(ctx, all_sum=probe))
    if not asked:
        return local
    found = score(learner, rows, how=how)
    pieces = [batch.replace(**found).rows(part) for part in parts]

    def run(piece: Batch, *, all_sum: AllSum) -> Loss:
        return policy_loss(recipe, piece, replace(ctx, all_sum=all_sum))

    return over_microbatches(run, pieces)


def _narrow(batch: Batch, tokens: int) -> Batch:
    """The batch with the columns its trimmed rows still have."""
    wide = [(name, value) for name, value in batch.items() if value.dim() > 1]
    return batch.replace(
        **{name: value[:, :tokens] for name, value in wide if FIELDS[name].per_token}
    )


__all__ = ["Descent", "gradients"]
