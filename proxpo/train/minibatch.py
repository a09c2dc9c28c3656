"""Gradient of one mini-batch: a forward and a backward pass for each of its micro-batches."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from proxpo.backward import (
    BackwardPass,
    asks_for_sums,
    backward_pass,
    policy_term,
    sums_over_step,
)
from proxpo.compose import count, policy_loss
from proxpo.ops.memory import is_out_of_memory
from proxpo.ops.metering import combined, share_of_step
from proxpo.ops.shapes import Int, Tensor
from proxpo.replay.comparison import difference
from proxpo.stages.schedule import Rescale
from proxpo.train.batch import TrainingBatch
from proxpo.train.cuts import Cut, restored
from proxpo.train.experience import Experience
from proxpo.train.scoring import (
    VOCABULARY,
    Learner,
    LogpOptions,
    forward,
    in_micro_batches,
    prompts_run_once,
    score,
    vocabulary_logp,
    widened,
)
from proxpo.types import AllSum, Batch, Clock, Context, Metrics, Recipe, local

COMPARED = 8  # rows on which recorded and unrecorded gradients are compared


def gradients(
    learner: Learner,
    recipe: Recipe,
    data: TrainingBatch,
    options: LogpOptions,
    *,
    seed: int,
    clock: Clock = Clock(),
    rescale: Rescale | None = None,
) -> tuple[Metrics, Batch]:
    """Adds the gradient of a mini-batch to the parameters, micro-batch by micro-batch.

    `data.batch` holds what is fixed for the rollout; the micro-batches share its denominators, so
    that they add up to the gradient of the mini-batch in one piece. Responses without a token to
    train on count in the denominators and cost nothing. Returns the metrics of the whole, and the
    batch with those fields of the present policy that a stage reads after the step.
    """
    ctx = Context(all_sum=local, denominators=count(data.batch), states=learner.state, clock=clock)
    data = _trained_rows(recipe, data)
    _compare_recording(learner, data.experience, options)

    def work(parts: Cut) -> tuple[Metrics, Batch]:
        learner.budget.cut_at = learner.budget.tokens if len(parts) > 1 else 0
        return _accumulated(learner, recipe, data, parts, options, ctx, seed, rescale)

    return in_micro_batches(
        learner,
        data.experience,
        options,
        work,
        undo=_gradient_reset(learner) if options.micro_batch is None else lambda: None,
        runs_twice=lambda: asks_for_sums(recipe, data.batch, ctx),
    )


def _compare_recording(learner: Learner, experience: Experience, options: LogpOptions) -> None:
    """Leaves recorded passes where their gradients are not those of the model's modules.

    Compares them on a few rows, once in a run, before the first update.
    """
    graphs = learner.graphs
    if graphs is None or graphs.compared:
        return
    graphs.compared = True
    rows = experience.rows(_compared_rows(learner, experience, options))
    plain = replace(options, fields=options.fields & {"entropy"}, old_is_current=False)
    try:
        reason = difference(
            graphs,
            rows,
            partial(forward, replace(learner, graphs=None), rows, plain),
            temperature=options.temperature,
            entropy="entropy" in options.fields,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        learner.budget.on_notice(
            f"{graphs.setting}: no memory to compare a recorded pass with an unrecorded one"
        )
        return
    if reason:
        learner.graphs = None
        graphs.give_up(reason)


def _compared_rows(
    learner: Learner, experience: Experience, options: LogpOptions
) -> Int[Tensor, " row"]:
    """The longest row, and responses to its prompt: as many as any micro-batch may have."""
    length = experience.attention_mask.sum(dim=1)
    longest = length.argmax()
    order = (experience.shared_prompt == experience.shared_prompt[longest]).int()
    order[longest] = 2
    rows = options.micro_batch or learner.budget.tokens // (2 * int(length[longest]))
    rows = min(max(rows, 1), COMPARED, int((order > 0).sum()))
    return order.argsort(descending=True, stable=True)[:rows]


def _accumulated(
    learner: Learner,
    recipe: Recipe,
    data: TrainingBatch,
    parts: Cut,
    options: LogpOptions,
    ctx: Context,
    seed: int,
    rescale: Rescale | None,
) -> tuple[Metrics, Batch]:
    """`gradients` for one cut into micro-batches."""
    mask = data.batch.mask
    sums = partial(_sums, learner, data=data, parts=parts, options=options, ctx=ctx)
    policy_sum = None
    if learner.transform is not None and policy_term(recipe) != recipe:
        policy_sum = sums(policy_term(recipe))  # which asks for other sums, in another order
    ctx = replace(ctx, all_sum=sums(recipe))
    tokens = torch.tensor([float(mask[part].sum()) for part in parts], dtype=torch.float64)
    metrics: Metrics = {}
    present: list[dict[str, Tensor]] = []
    for number, part in enumerate(parts):
        own = replace(ctx, generator=_generator(seed, number))
        rows = data if len(parts) == 1 else data.rows(part)
        _, loss, fields = _backward(learner, recipe, rows, options, own, policy_sum)
        present.append(_read_after_step(recipe, fields, mask.shape[1]))
        share = share_of_step(tokens[number], tokens.sum(), parts=len(parts))
        metrics = combined(recipe, metrics, {**loss.metrics, "loss": loss.value}, share=share)
    if rescale is not None:
        measured = replace(ctx, all_sum=sums(rescale.loss))  # which asks for sums of its own
        metrics |= _rescaled(learner, rescale, data, parts, options, measured, seed)
    by_tokens = options.micro_batch is None
    joined = {
        name: restored([fields[name] for fields in present], parts, sorted_rows=by_tokens)
        for name in present[0]
    }
    return metrics, data.batch.replace(**joined).clean(*joined) if joined else data.batch


def _gradient_reset(learner: Learner) -> Callable[[], None]:
    """Returns the gradients and the transform, when called, to what they are now."""
    parameters = learner.trainable()
    before = [None if p.grad is None else p.grad.clone() for p in parameters]

    def reset() -> None:
        for p, grad in zip(parameters, before):
            p.grad = None if grad is None else grad.clone()
        if learner.transform is not None:
            learner.transform.step(skipped=True)

    return reset


def _trained_rows(recipe: Recipe, data: TrainingBatch) -> TrainingBatch:
    """The responses with a token to train on; all of them where they are compared with others."""
    filled = data.batch.mask.any(dim=1)
    compared = recipe.trust.gives == "log_ratio" or (recipe.advantage and recipe.advantage.live)
    if compared or bool(filled.all()):
        return data
    return data.rows(filled.nonzero()[:, 0] if bool(filled.any()) else filled.new_zeros(1).long())


def _read_after_step(recipe: Recipe, fields: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """The policy's fields that a stage reads after the step, padded to this width."""
    read = {name for _, stage in recipe.stages() if stage.step for name in stage.needs}
    return {name: widened(fields[name].detach(), width) for name in fields.keys() & read}


def _generator(seed: int, number: int) -> torch.Generator:
    """Random numbers of a micro-batch."""
    return torch.Generator(device="cpu").manual_seed((seed + number) % 2**63)


def _rescaled(
    learner: Learner,
    rescale: Rescale,
    data: TrainingBatch,
    parts: Cut,
    options: LogpOptions,
    ctx: Context,
    seed: int,
) -> Metrics:
    """Measures the gradient of `rescale.loss` in a second pass and scales the policy's gradient."""
    parameters = [p for p in learner.policy.model.parameters() if p.requires_grad]
    # A copy: recorded passes write the next gradient into the memory of this one.
    gradient = [None if p.grad is None else p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    for number, part in enumerate(parts):
        cut = data.rows(part)
        batch = cut.batch.replace(**forward(learner, cut.experience, options))
        own = replace(ctx, generator=_generator(seed, number))
        value = policy_loss(rescale.loss, batch, own).value
        if value.requires_grad:
            value.backward()
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    factor = rescale.factor(norm)
    for p, grad in zip(parameters, gradient):
        p.grad = None if grad is None else grad.mul_(factor)
    return {"rescale/norm": torch.tensor(norm), "rescale/factor": torch.tensor(factor)}


def _backward(
    learner: Learner,
    recipe: Recipe,
    data: TrainingBatch,
    options: LogpOptions,
    ctx: Context,
    policy_sum: AllSum | None,
) -> BackwardPass:
    """Forward and backward of a micro-batch, under the learner's transform if it has one."""
    rows, applied = data.experience, None
    run: Callable[..., dict[str, Tensor]] = partial(forward, learner, rows, options)
    policy_run = run
    if learner.transform is not None:
        vocabulary = _vocabulary(learner, rows, options)
        policy_run = lambda: run(without=VOCABULARY) | vocabulary  # noqa: E731
        applied = _applied(learner, rows, options)
    with backward_pass(
        recipe,
        data.batch,
        ctx,
        forward=policy_run,
        forward_rest=run,
        applied=applied,
        policy_sum=policy_sum,
    ) as opened:
        opened.objective.backward()
    return opened


def _applied(
    learner: Learner, rows: Experience, options: LogpOptions
) -> Callable[..., AbstractContextManager[Any]]:
    """The transform's block on these rows, whose advantages are still to come."""
    if learner.graphs is not None:
        temperature, entropy = options.temperature, "entropy" in options.fields
        return partial(learner.graphs.applied, rows, temperature=temperature, entropy=entropy)
    model = learner.policy.model
    number = torch.arange(len(rows.mask), device=rows.mask.device)[:, None]
    if prompts_run_once(learner, model, rows):  # the head sees the responses alone
        sequences = number.expand(rows.mask.shape)
    else:
        sequences = torch.where(rows.attention_mask, number, -1)
    return partial(learner.transform.applied, model, sequences=sequences, groups=rows.group)


@torch.no_grad()
def _vocabulary(learner: Learner, rows: Experience, options: LogpOptions) -> dict[str, Tensor]:
    """The whole vocabulary's log-probabilities, where they are wanted.

    In a pass of its own: a transform sees each layer once, and the policy term moves `logp` alone.
    """
    if not options.fields & VOCABULARY:
        return {}
    with learner.policy.autocast():
        model = learner.policy.model
        return {"vocab_logp": vocabulary_logp(model, rows, options.temperature)}


def _sums(
    learner: Learner,
    recipe: Recipe,
    *,
    data: TrainingBatch,
    parts: Cut,
    options: LogpOptions,
    ctx: Context,
) -> AllSum:
    """Sums over all micro-batches, for recipes that ask for any."""

    def microbatches() -> list[Batch]:
        fields = score(learner, data.experience, options)
        return [data.batch.replace(**fields).rows(part) for part in parts]

    if len(parts) == 1:
        return ctx.all_sum
    return sums_over_step(recipe, data.batch, ctx, microbatches=microbatches)


__all__ = ["gradients"]
