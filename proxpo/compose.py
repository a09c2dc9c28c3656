"""The order of the stages, in one place: prepare() once per rollout, policy_loss() per micro-batch.

prepare:      reward -> filter -> advantage -> prune, and the counts everything is divided by
policy_loss:  weights -> ratio -> trust -> regularisers -> select -> aggregate (+ value); before
              them the advantage once more, if it follows the current policy
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from proxpo.conversion import check_rollout
from proxpo.errors import ProxpoError
from proxpo.fields import find_field
from proxpo.ops.groups import refreshed
from proxpo.ops.masked import spread
from proxpo.ops.metering import free_name, logged
from proxpo.ops.pairs import best_and_worst
from proxpo.ops.shapes import Float, Tensor
from proxpo.ops.streams import drawn_numbers
from proxpo.ops.sums import OverMicrobatches
from proxpo.settings import make_recipe
from proxpo.stages import check_stages
from proxpo.stages.schedule import variants
from proxpo.types import (
    KINDS,
    AllSum,
    Batch,
    Context,
    Denominators,
    Loss,
    Metrics,
    Reach,
    Recipe,
    Stage,
    local,
    memory_name,
    whole,
)

AROUND = {  # kinds of stages that act around the loss, and their effect
    "budget": "decides how many responses are sampled and how long they may be",
    "prompts": "decides which prompts are trained on and draws others",
    "gradient": "acts on the gradients of the model's layers (proxpo.gradients)",
    "schedule": "decides over the optimizer steps of a rollout",
}
OF_THE_LOSS = KINDS[KINDS.index("weights") : KINDS.index("gradient")]  # for each micro-batch
_WARNED: set[str] = set()  # lines that this process has warned with


class Prepared(NamedTuple):
    """A batch with advantages and its final mask, a context with the step's counts, and metrics."""

    batch: Batch
    ctx: Context
    metrics: Metrics


def loss_fn(recipe: Recipe | str) -> Callable[..., Loss]:
    """The recipe as one function of a whole batch: `loss_fn("grpo")(batch).value.backward()`.

    A name stands for the method with its defaults. A warning lists what the recipe does around its
    loss, which is left out (`left_out`).
    """
    recipe = check_stages(_as_recipe(recipe))
    _warn_left_out(recipe)
    plain = recipe.replace(gradient=None)  # the line above has said so

    def loss(batch: Batch, ctx: Context = Context()) -> Loss:
        if ctx.all_sum is whole:  # and `batch` is: nothing to verify
            ctx = replace(ctx, all_sum=local)
        ready = prepare(recipe, batch, ctx)
        value, metrics = policy_loss(plain, ready.batch, ready.ctx)
        together = ready.metrics | metrics
        return Loss(value, logged(together) if ctx.states is None else together)

    return loss


def left_out(recipe: Recipe) -> dict[str, str]:
    """Parts of the recipe that act around its loss, by place, as clauses of a sentence."""
    return {
        place: f"{stage.kind}={stage.name}, which {AROUND[stage.kind]}"
        for place, stage in recipe.stages()
        if stage.kind in AROUND
    }


def _warn_left_out(recipe: Recipe, *, but: str = "") -> None:
    """Warns of parts of the recipe around its loss, those at the place `but` excepted."""
    parts = "; ".join(part for place, part in left_out(recipe).items() if place != but)
    if parts:
        _warn(f"{recipe.name}: this loss is without {parts}. `proxpo train` applies all of it")


def _warn_untransformed(recipe: Recipe) -> None:
    if recipe.gradient is not None:
        _warn(
            f"{recipe.name}: this loss is without gradient={recipe.gradient.name}, which "
            f"{AROUND['gradient']}: proxpo.backward_pass makes its backward pass"
        )


def _warn_fresh_memory(recipe: Recipe) -> None:
    """Warns of stages whose memory a loop must keep, for a loop that gives none."""
    stages = [
        f"{stage.kind}={stage.name}"
        for _, stage in recipe.stages()
        if stage.kind not in AROUND and (stage.update or stage.step)
    ]
    if stages:
        _warn(
            f"{recipe.name}: the memory of {' and '.join(stages)} starts anew in every call; "
            "pass proxpo.Context(states=...), from recipe.init_state(), and move them with "
            "recipe.step_state after an optimizer step and recipe.update_state after a rollout"
        )


def _warn(line: str) -> None:
    """Warns once in a process."""
    if line not in _WARNED:
        warnings.warn(line, stacklevel=4)
        _WARNED.add(line)


def check_advantages_come(recipe: Recipe) -> None:
    """Refuses a loss of advantages that has no stage for them, for batches without the field."""
    if recipe.advantage is None and recipe.trust.gives == "loss":
        raise ProxpoError(
            f"{recipe.name or 'the recipe'} has no advantage stage, so it needs the batch field "
            "'advantages'"
        )


def prepare(recipe: Recipe | str, batch: Batch, ctx: Context = Context()) -> Prepared:
    """Computes what is fixed for all updates on a rollout: mask, advantages, denominators.

    Groups must be whole in `batch`; ranks may hold different groups (`ctx.all_sum` adds over them).
    Advantages given with the batch are used as they are; a critic's targets are computed from the
    recipe's rewards all the same. Numbers at valid tokens must be finite. Fields that are not of
    the policy's forward pass are constants, whether they come with a gradient or not.
    """
    recipe, batch = _as_recipe(recipe), _as_batch(batch)
    if ctx.states is None:  # a loop of one's own: a trainer keeps states
        _warn_left_out(recipe, but="gradient")  # without which backward_pass refuses
        _warn_fresh_memory(recipe)
    run = _StageRunner(recipe, ctx)
    batch = _constants_detached(batch.clean())
    check_rollout(batch.items(), batch.mask)
    earned = batch.rewards  # filters judge these: a length penalty makes no prompt informative
    with torch.no_grad():
        if batch.advantages is None or makes_targets(recipe, batch):
            for stage in recipe.reward:
                batch = run(f"reward.{stage.name}", stage, batch)
        for stage in recipe.filter:
            keep = run(f"filter.{stage.name}", stage, batch.replace(rewards=earned))
            batch = batch.replace(mask=batch.mask & keep)
        if batch.advantages is None:
            advantages = batch.logp.new_zeros(batch.logp.shape)
            check_advantages_come(recipe)
            if recipe.advantage is not None:
                advantages = run("advantage", recipe.advantage, batch)
                batch = refreshed(batch) if recipe.advantage.live else batch
            batch = batch.replace(advantages=advantages)
        for stage in recipe.prune:  # rows that leave now have had their say in the advantages
            batch = batch.replace(mask=batch.mask & run(f"prune.{stage.name}", stage, batch))
    batch = batch.replace(advantages=as_tokens(batch.advantages, batch)).clean()
    with _full_precision(batch.logp):
        for _, stage in recipe.stages():
            if stage.prepare is not None:
                batch = batch.replace(**stage.prepare(batch))
            if stage.draws and getattr(batch, stage.draws) is None:
                batch = batch.replace(**{stage.draws: drawn_numbers(batch.mask, ctx.generator)})
    if batch.group is not None and batch.group_tokens is None:
        batch = batch.replace(group_tokens=tokens_of_group(batch))
    counted = replace(ctx, denominators=count(batch, all_sum=ctx.all_sum))
    return Prepared(batch, counted, run.metrics)


def _constants_detached(batch: Batch) -> Batch:
    """Keeps the gradient of the policy's pass alone: `old_values=values` makes no moving target."""
    others = {name: x for name, x in batch.items() if find_field(name).source != "policy"}
    return batch.replace(**{name: x.detach() for name, x in others.items() if x.requires_grad})


def makes_targets(recipe: Recipe, batch: Batch) -> bool:
    """True if the recipe has a critic whose targets the batch does not bring."""
    critic = batch.values is not None or batch.old_values is not None
    return recipe.value is not None and critic and batch.returns is None


def policy_loss(recipe: Recipe | str, batch: Batch, ctx: Context) -> Loss:
    """Loss of a prepared batch, or of any cut of it: the cuts add up to the whole.

    `ctx` is the one that `prepare` returned, or any with the step's denominators. The fields of the
    current forward pass may be new: logp, entropy, values, vocab_logp. With the default `all_sum`,
    a recipe that compares responses or takes statistics of the batch is refused on a cut that
    cannot answer: `proxpo.over_microbatches` makes the sums of all cuts. Stages that look at each
    cut by itself (scope="microbatch") do not add up: they are refused, or warned of where there
    are such sums.
    """
    recipe, batch = _as_recipe(recipe), _as_batch(batch)
    if batch.advantages is None:
        raise ProxpoError(
            f"{recipe.name or 'the recipe'}: the batch has no advantages; policy_loss needs the "
            "one that proxpo.prepare returns"
        )
    if batch.advantages.dim() == 1:  # of a caller, in place of those that `prepare` spreads
        batch = batch.replace(advantages=as_tokens(batch.advantages, batch))
    if ctx.states is None and batch.logp.requires_grad:  # a loop of one's own
        _warn_untransformed(recipe)
    if ctx.all_sum is whole or isinstance(ctx.all_sum, OverMicrobatches):
        _check_local_stages(recipe, batch, ctx)
    if ctx.all_sum is whole:
        ctx = replace(ctx, all_sum=_uncut(recipe, batch, ctx.counts))
    run = _StageRunner(recipe, ctx)
    read = {"logp"}.union(*(stage.needs for _, stage in recipe.stages()))
    batch = batch.clean(*(name for name in read if find_field(name).source == "policy"))
    # Bounds on a ratio would hide an infinite log-probability; NaN comes through to the loss.
    batch = batch.replace(logp=batch.logp.masked_fill(batch.logp.isinf(), torch.nan))
    if recipe.advantage is not None and recipe.advantage.live and batch.refresh is not None:
        with torch.no_grad():
            advantages = as_tokens(run("advantage", recipe.advantage, batch), batch)
        batch = batch.replace(advantages=advantages.masked_fill(~batch.mask, 0.0))
    ratio = run("ratio", recipe.ratio, batch)
    token_loss = run("trust", recipe.trust, batch, ratio)
    for stage in recipe.weights:
        token_loss = token_loss * run(f"weights.{stage.name}", stage, batch)
    for stage in recipe.regularisers:
        token_loss = token_loss + run(f"regularisers.{stage.name}", stage, batch, ratio)
    for stage in recipe.select:
        token_loss = token_loss * run(f"select.{stage.name}", stage, batch)
    loss = run("aggregate", recipe.aggregate, batch, token_loss)
    if recipe.value is not None and batch.values is not None:
        value_terms = run("value", recipe.value, batch)
        value_loss = run("aggregate", recipe.aggregate, batch, value_terms)
        run.metrics["loss/value"] = value_loss.detach()
        loss = loss + value_loss
    return Loss(loss, {name: value.detach() for name, value in run.metrics.items()})


def local_stages(recipe: Recipe) -> list[str]:
    """Stages of the loss that look at each micro-batch by itself, as "kind=name".

    The losses that a schedule makes its updates with count as well.
    """
    losses = variants(recipe) or (recipe,)
    stages = [stage for loss in losses for _, stage in loss.stages()]
    names = [f"{s.kind}={s.name}" for s in stages if s.kind in OF_THE_LOSS and not s.whole_batch]
    return list(dict.fromkeys(names))


def _check_local_stages(recipe: Recipe, batch: Batch, ctx: Context) -> None:
    """Refuses stages that look at a cut by itself, or warns of them where cuts are added up."""
    stages = [s for _, s in recipe.stages() if s.kind in OF_THE_LOSS and not s.whole_batch]
    if not stages:
        return
    if int(batch.mask.sum()) == int(ctx.counts.tokens):
        return
    names = " and ".join(dict.fromkeys(f"{s.kind}={s.name}" for s in stages))
    line = (
        f"{recipe.name or 'recipe'}: {names} looks at each cut of a batch by itself, so the losses "
        "of cuts do not add up to that of the batch"
    )
    if any("scope" in stage.options for stage in stages):
        line += ": set its scope to batch"
    if ctx.all_sum is whole:
        raise ProxpoError(f"{line}, or pass all_sum=proxpo.types.local to train on the cuts as is")
    _warn(line)


def _uncut(recipe: Recipe, batch: Batch, counts: Denominators) -> AllSum:
    """An `all_sum` that returns its argument, and refuses a batch that lacks part of the sum."""

    @functools.cache  # a loss may ask many times, and the answer waits for the device
    def check_cut(scope: Reach) -> None:
        tokens, total = int(batch.mask.sum()), int(counts.tokens)
        if tokens != total if scope == "batch" else not _holds_groups(batch, counts):
            raise ProxpoError(
                f"{recipe.name or 'recipe'}: the loss takes sums over "
                f"{'whole groups' if scope == 'rank' else 'the whole step'}, and this cut has "
                f"{tokens} of the step's {total} tokens: pass "
                "all_sum=proxpo.over_microbatches(loss, cuts), or proxpo.over_ranks() on every rank"
            )

    def all_sum(x: Tensor, scope: Reach = "batch") -> Tensor:
        if scope != "microbatch":
            check_cut(scope)
        return x

    return all_sum


def _holds_groups(batch: Batch, counts: Denominators) -> bool:
    """True if the batch has every response to its prompts and every empty response of the step."""
    rows, filled = len(batch.mask), int(batch.mask.any(dim=1).sum())
    if batch.group_tokens is None:
        return rows == int(counts.rows)
    complete = bool((tokens_of_group(batch) == batch.group_tokens).all())
    return complete and rows - filled == int(counts.rows - counts.sequences)


def _as_recipe(recipe: Recipe | str) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return make_recipe(recipe)
    hint = ": call it first" if callable(recipe) else ""
    raise ProxpoError(f"expected a recipe or the name of a method, got {recipe!r}{hint}")


def _as_batch(batch: Batch) -> Batch:
    if not isinstance(batch, Batch):
        raise ProxpoError(f"expected a proxpo.Batch, got {type(batch).__name__}: Batch(logp=...)")
    return batch


class _StageRunner:
    """Applies stages of a recipe, each with its own state, and gathers their metrics."""

    def __init__(self, recipe: Recipe, ctx: Context) -> None:
        self.recipe, self.ctx = recipe, ctx
        self.states = recipe.init_state() if ctx.states is None else ctx.states
        self.metrics: Metrics = {}
        self.writers: dict[str, Stage] = {}

    def __call__(self, place: str, stage: Stage, batch: Batch, *inputs: Tensor) -> Any:
        if stage.active(self.ctx.clock):
            require(self.recipe, stage, batch)
        own = replace(self.ctx, state=self.states.get(place, {}))
        with _full_precision(batch.logp):
            value, metrics = stage.apply(*inputs, batch, own)
        for name, number in metrics.items():
            if self.writers.setdefault(name, stage) is stage:  # an average of the critic's as well
                self.metrics[name] = number
            else:
                self.metrics[free_name(name, self.metrics)] = number
            if stage.update or stage.step:
                self.metrics[memory_name(place, name)] = number
        return value


def _full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Block without autocast, under which matrix products of a stage would run in bfloat16."""
    device = like.device.type
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def count(batch: Batch, *, all_sum: AllSum = local) -> Denominators:
    """Valid tokens, non-empty responses, all responses, prompts and reward-ordered pairs."""
    filled = batch.mask.any(dim=1)
    counts = [int(batch.mask.sum()), int(filled.sum()), len(filled)]
    if batch.group is not None:
        counts.append(batch.group[filled].unique().numel())
        if batch.rewards is not None:
            pairs = len(best_and_worst(batch)[0]) if batch.pair is None else (batch.pair > 0).sum()
            counts.append(int(pairs))
    totals = all_sum(torch.tensor(counts, dtype=torch.float64, device=batch.mask.device))
    named = dict(zip(("tokens", "sequences", "rows", "prompts", "pairs"), totals))
    return Denominators(**named)


def tokens_of_group(batch: Batch) -> Tensor:
    """N_g for each response: the valid tokens of all responses to its prompt."""
    _, index = batch.group.unique(return_inverse=True)
    lengths = batch.mask.sum(dim=1)
    totals = torch.zeros_like(lengths).index_add(0, index, lengths) if len(lengths) else lengths
    return totals[index]


def as_tokens(advantages: Tensor, batch: Batch) -> Float[Tensor, "seq tok"]:
    """Advantages per token, detached, in the dtype of the log-probabilities."""
    advantages = advantages.detach().to(batch.logp.dtype)
    return spread(advantages, batch.mask) if advantages.dim() == 1 else advantages


def require(recipe: Recipe, stage: Stage, batch: Batch) -> None:
    """Refuses a batch without a field that the stage reads."""
    for name in stage.needs:
        if name in stage.instead and getattr(batch, stage.instead[name]) is not None:
            continue
        batch.require(name, by=f"{recipe.name or 'recipe'}: {stage.kind}={stage.name}")


__all__ = [
    "Prepared",
    "check_advantages_come",
    "count",
    "left_out",
    "local_stages",
    "loss_fn",
    "makes_targets",
    "policy_loss",
    "prepare",
]
