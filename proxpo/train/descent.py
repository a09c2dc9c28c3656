"""The update on a mini-batch: one backward pass, micro-batch by micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from proxpo.backward import BackwardPass, backward_pass, policy_term, sums_over_step
from proxpo.compose import count, policy_loss
from proxpo.ops.metering import combined
from proxpo.ops.shapes import Tensor
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
from proxpo.types import FIELDS, AllSum, Batch, Clock, Context, Metrics, Recipe, local


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
    ctx = Context(all_sum=local, denominators=count(batch), states=learner.state, clock=clock)
    rows, batch = _filled(recipe, rows, batch)
    batch = _narrow(batch, rows.mask.shape[1])
    parts = list(cuts(len(batch.mask), how.micro_batch, batch.mask.device))
    sums = partial(_sums, learner, rows=rows, batch=batch, parts=parts, how=how, ctx=ctx)
    policy_sum = None
    if learner.transform is not None and policy_term(recipe) != recipe:
        policy_sum = sums(policy_term(recipe))  # which asks for other sums, in another order
    ctx = replace(ctx, all_sum=sums(recipe))
    share = [float(batch.mask[part].sum()) for part in parts]
    totals: Metrics = {}
    present: list[dict[str, Tensor]] = []
    for number, part in enumerate(parts):
        own = replace(ctx, generator=_draws(seed, number))
        _, loss, fields = _backward(
            learner, recipe, rows.rows(part), batch.rows(part), how, own, policy_sum
        )
        present.append(_followed(recipe, fields, batch.mask.shape[1]))
        weight = share[number] / max(sum(share), 1.0)
        seen = {**loss.metrics, "loss": loss.value}
        totals = combined(recipe, totals, seen, share=weight)
    if rescale is not None:
        totals |= _rescaled(learner, rescale, rows, batch, parts, how, ctx, seed)
    joined = {name: torch.cat([one[name] for one in present]) for name in present[0]}
    return Descent(totals, batch.replace(**joined).clean(*joined) if joined else batch)


def _followed(recipe: Recipe, now: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
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
    policy_sum: AllSum | None,
) -> BackwardPass:
    """Forward and backward of a micro-batch, under the learner's transform if it has one."""
    run: Callable[..., dict[str, Tensor]] = partial(forward, learner, rows, how=how)
    policy_run, applied = run, None
    if learner.transform is not None:
        aside = _vocabulary(learner, rows, how)
        policy_run = lambda: run(without=VOCABULARY) | aside  # noqa: E731
        number = torch.arange(len(rows.mask), device=rows.mask.device)[:, None]
        applied = partial(
            learner.transform.applied,
            learner.policy.model,
            sequences=torch.where(rows.attention_mask, number, -1),
            groups=rows.group,
        )
    with backward_pass(
        recipe,
        _narrow(batch, rows.mask.shape[1]),
        ctx,
        forward=policy_run,
        forward_rest=run,
        applied=applied,
        policy_sum=policy_sum,
    ) as opened:
        opened.objective.backward()
    return opened


@torch.no_grad()
def _vocabulary(learner: Learner, rows: Experience, how: Pass) -> dict[str, Tensor]:
    """The whole vocabulary's log-probabilities, if anybody reads them.

    In a pass of its own: a transform sees each layer once, and the policy term moves `logp` alone.
    """
    if not learner.recipe.needs() & VOCABULARY:
        return {}
    with learner.policy.autocast():
        return {"vocab_logp": vocabulary(learner.policy.model, rows, None, how)}


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
    """Statistics over all micro-batches, for recipes that ask for any."""

    def microbatches() -> list[Batch]:
        fields = score(learner, rows, how=how)
        return [batch.replace(**fields).rows(part) for part in parts]

    if len(parts) == 1:
        return ctx.all_sum
    return sums_over_step(recipe, batch, ctx, microbatches=microbatches)


def _narrow(batch: Batch, tokens: int) -> Batch:
    """The batch with the columns its trimmed rows still have."""
    wide = [(name, value) for name, value in batch.items() if value.dim() > 1]
    return batch.replace(
        **{name: value[:, :tokens] for name, value in wide if FIELDS[name].per_token}
    )


__all__ = ["Descent", "gradients"]
