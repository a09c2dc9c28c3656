"""The side that learns: policy, critic, reference, optimizer, and the update on a mini-batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from proxpo.compose import count, policy_loss
from proxpo.logp import model_logp, score_features, token_logp
from proxpo.rescaling import measured_loss
from proxpo.shapes import Float, Int, Tensor
from proxpo.sums import over_microbatches
from proxpo.train.experience import Experience
from proxpo.train.models import Policy
from proxpo.train.prefix import shares_prompts, states_before
from proxpo.transforms import objective, per_response
from proxpo.types import (
    ROWS,
    AllSum,
    Batch,
    Clock,
    Loss,
    Metrics,
    Reach,
    Recipe,
    State,
    local,
)

STATES = {"hidden", "vocab_logp", "old_vocab_logp"}  # fields read off the states before the head


@dataclass(kw_only=True)
class Learner:
    """Everything a step changes, in one place a checkpoint can reach."""

    policy: Policy
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None = None
    critic: nn.Linear | None = None
    transform: Any = None
    state: Mapping[str, State] = field(default_factory=dict)
    version: int = 0

    def trainable(self) -> list[nn.Parameter]:
        extra = [] if self.critic is None else list(self.critic.parameters())
        return [p for p in [*self.policy.model.parameters(), *extra] if p.requires_grad]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How log-probabilities are to be computed: temperature and rows at a time.

    fresh: the data are the current policy's own and get one update, so that the old
    log-probabilities are the current ones and need no pass of their own.
    """

    temperature: float
    micro_batch: int
    fresh: bool = False


def needs(recipe: Recipe) -> set[str]:
    """Batch fields the recipe, its passes and its variant for fresh data read."""
    variants = [recipe, *recipe.passes, *([recipe.fresh] if recipe.fresh else [])]
    return {name for one in variants for _, stage in one.stages() for name in stage.needs}


def cuts(rows: int, size: int, device: torch.device) -> Iterator[Int[Tensor, " row"]]:
    """Row numbers of each micro-batch."""
    yield from torch.arange(rows, device=device).split(size)


def forward(
    learner: Learner, rows: Experience, *, how: Pass, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """logp of the response tokens, and what else of the policy's numbers the recipe reads.

    Prompts run once for all their responses where that comes to the same; gradient transforms work
    in the model's own modules, on whole sequences.
    """
    wanted = needs(learner.recipe) if model is None else set()
    own, model = model is None, model or learner.policy.model
    options = {"temperature": how.temperature, "entropy": "entropy" in wanted}
    shared = learner.transform is None and shares_prompts(model)
    find = _shared if shared else _whole
    states_wanted = own and (learner.critic is not None or bool(wanted & STATES))
    with learner.policy.autocast():
        found, states = find(model, rows, options, hidden=states_wanted)
        out = dict(found._asdict()) if options["entropy"] else {"logp": found}
        if wanted & {"vocab_logp", "old_vocab_logp"}:
            out["vocab_logp"] = vocabulary(model, rows, states if shared else None, how)
    if own and learner.critic is not None:
        # The critic does not move the policy.
        out["values"] = learner.critic(states.detach().float())[..., 0]
    if wanted & {"hidden"}:
        out["hidden"] = states.detach().float()
    if own and how.fresh:
        out["old_logp"] = out["logp"].detach()
    return out


def vocabulary(
    model: Any, rows: Experience, states: Tensor | None, how: Pass
) -> Float[Tensor, "seq tok vocab"]:
    """log π of every token of the vocabulary, from the states that enter the head or a whole run.

    All of it is held at once: rows x tokens x vocabulary.
    """
    if states is not None:
        head = model.get_output_embeddings()
        logits = nn.functional.linear(states, head.weight, head.bias)
    else:
        width = rows.mask.shape[1]
        places = (rows.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        given = {"attention_mask": rows.attention_mask, "position_ids": places}
        logits = model(input_ids=rows.input_ids, use_cache=False, **given).logits[
            :, -width - 1 : -1
        ]
    return (logits.float() / how.temperature).log_softmax(dim=-1)


def _shared(
    model: Any, rows: Experience, options: dict[str, Any], *, hidden: bool
) -> tuple[Any, Tensor | None]:
    states, head = states_before(model, rows), model.get_output_embeddings()
    targets = rows.input_ids[:, -rows.mask.shape[1] :]
    found = token_logp(states, head.weight, targets, bias=head.bias, mask=rows.mask, **options)
    return found, states if hidden else None


def _whole(
    model: Any, rows: Experience, options: dict[str, Any], *, hidden: bool
) -> tuple[Any, Tensor | None]:
    with _entering(model.get_output_embeddings(), wanted=hidden) as states:
        found = model_logp(
            model, rows.input_ids, rows.mask, attention_mask=rows.attention_mask, **options
        )
    # A token's value belongs to the state before it.
    return found, states[0][:, -rows.mask.shape[1] - 1 : -1] if hidden else None


@torch.no_grad()
def score(
    learner: Learner, rows: Experience, *, how: Pass, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """`forward` without gradient, a micro-batch at a time, on all rows."""
    width = rows.mask.shape[1]
    parts = []
    for index in cuts(len(rows.mask), how.micro_batch, rows.mask.device):
        found = forward(learner, rows.rows(index), how=how, model=model)
        parts.append({name: widened(value, width) for name, value in found.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def features(learner: Learner, rows: Experience, *, how: Pass) -> Float[Tensor, "seq dim"]:
    """d log π/d hidden, averaged over each response, a micro-batch at a time."""
    model = learner.policy.model
    find, head = _shared if shares_prompts(model) else _whole, model.get_output_embeddings()
    parts = []
    for index in cuts(len(rows.mask), how.micro_batch, rows.mask.device):
        some = rows.rows(index)
        with learner.policy.autocast():
            options = {"temperature": how.temperature, "entropy": False}
            _, states = find(model, some, options, hidden=True)
        targets = some.input_ids[:, -some.mask.shape[1] :]
        parts.append(
            score_features(
                states,
                head.weight,
                targets,
                some.mask,
                bias=head.bias,
                temperature=how.temperature,
            )
        )
    return torch.cat(parts)


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
    clock: Clock | None = None,
) -> Descent:
    """Backward of one mini-batch, micro-batch by micro-batch; the metrics of the whole.

    `batch` holds what is fixed for the rollout; the micro-batches share its denominators, so they
    add up to the gradient of the mini-batch in one piece. Responses without a token to train on
    count in the denominators and cost nothing. Of the policy's present numbers the batch handed
    back has those that a stage reads after the step.
    """
    fixed: dict[str, Any] = {"denominators": count(batch), "state": learner.state, "clock": clock}
    rows, batch = _filled(recipe, rows, batch)
    batch = _narrow(batch, rows.mask.shape[1])
    parts = list(cuts(len(batch.mask), how.micro_batch, batch.mask.device))
    sums = partial(_sums, learner, rows=rows, batch=batch, parts=parts, how=how, fixed=dict(fixed))
    fixed["all_sum"] = apart = sums(recipe)
    if learner.transform is not None and _bare(recipe) != recipe:
        apart = sums(_bare(recipe))  # it asks for other sums, in another order
    share = [float(batch.mask[part].sum()) for part in parts]
    totals: Metrics = {}
    present: list[dict[str, Tensor]] = []
    for number, part in enumerate(parts):
        options = fixed | {"generator": _draws(seed, number)}
        loss, now = _backward(
            learner, recipe, rows.rows(part), batch.rows(part), how, options, apart
        )
        present.append(_followed(recipe, now, batch.mask.shape[1]))
        weight = share[number] / max(sum(share), 1.0)
        for name, value in loss.metrics.items():
            seen, before = value.detach().float(), totals.get(name)
            if name.endswith("_max"):
                totals[name] = seen if before is None else torch.maximum(before, seen)
            else:
                totals[name] = weight * seen if before is None else before + weight * seen
        totals["loss"] = totals.get("loss", 0.0) + loss.value.detach().float()
    if recipe.rescale is not None:
        totals |= _rescaled(learner, recipe, rows, batch, parts, how, fixed, seed)
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
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    parts: list[Tensor],
    how: Pass,
    fixed: dict[str, Any],
    seed: int,
) -> Metrics:
    """A second backward pass measures what the rescale stage asks for; the policy's are scaled."""
    assert recipe.rescale is not None
    trained = [p for p in learner.policy.model.parameters() if p.requires_grad]
    found = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    for number, part in enumerate(parts):
        cut = rows.rows(part)
        narrow = _narrow(batch.rows(part), cut.mask.shape[1])
        now = narrow.replace(**forward(learner, cut, how=how))
        value = measured_loss(recipe, now, **(fixed | {"generator": _draws(seed, number)}))
        if value.requires_grad:
            value.backward()
    squares = [p.grad.double().square().sum() for p in trained if p.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    factor = recipe.rescale.apply.factor(norm)  # type: ignore[attr-defined]
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
    options: dict[str, Any],
    apart: AllSum,
) -> tuple[Loss, dict[str, Tensor]]:
    """The loss, and what the forward pass brought.

    `apart` adds over micro-batches for the policy term alone, as a transform sees it.
    """
    narrow = _narrow(batch, rows.mask.shape[1])
    if learner.transform is None:
        found = forward(learner, rows, how=how)
        loss = policy_loss(recipe, narrow.replace(**found), **options)
        loss.value.backward()
        return loss, found
    bare, alone = _bare(recipe), options | {"all_sum": apart}
    if bare != recipe:
        # Terms without an advantage: an ordinary backward of their own.
        now = narrow.replace(**forward(learner, rows, how=how))
        extra = policy_loss(recipe, now, **options).value - policy_loss(bare, now, **alone).value
        extra.backward()
    sequences = torch.where(
        rows.attention_mask, torch.arange(len(rows.mask), device=rows.mask.device)[:, None], -1
    )
    advantages = per_response(recipe, narrow)
    with learner.transform.applied(
        learner.policy.model, sequences=sequences, advantages=advantages, groups=rows.group
    ):
        found = forward(learner, rows, how=how)
        split = objective(recipe, narrow.replace(**found), **alone)
        (-(split.weights * found["logp"]).sum()).backward()
    return split.loss, found


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
    fixed: dict[str, Any],
) -> AllSum:
    """Statistics over all micro-batches, for recipes that ask for any; else nothing to do."""
    asked: list[Tensor] = []

    def probe(x: Tensor, scope: Reach = "batch") -> Tensor:
        asked.append(x)
        return x

    if len(parts) > 1:
        policy_loss(recipe, batch, all_sum=probe, **fixed)
    if not asked:
        return local
    found = score(learner, rows, how=how)
    pieces = [batch.replace(**found).rows(part) for part in parts]

    def run(piece: Batch, *, all_sum: AllSum) -> Loss:
        return policy_loss(recipe, piece, all_sum=all_sum, **fixed)

    return over_microbatches(run, pieces)


def widened(x: Tensor, tokens: int) -> Tensor:
    """Padded on the right to this many tokens."""
    behind = [0, 0] * (x.dim() - 2)
    return nn.functional.pad(x, (*behind, 0, tokens - x.shape[1]))


def _narrow(batch: Batch, tokens: int) -> Batch:
    """The batch with the columns its trimmed rows still have."""
    wide = [(name, value) for name, value in batch.items() if value.dim() > 1]
    return batch.replace(**{name: value[:, :tokens] for name, value in wide if name not in ROWS})


@contextmanager
def _entering(head: nn.Module, *, wanted: bool) -> Iterator[list[Tensor]]:
    """The hidden states that enter the head during the block, if anybody reads them."""
    caught: list[Tensor] = []
    if not wanted:
        yield caught
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        yield caught
    finally:
        handle.remove()


__all__ = ["Descent", "Learner", "Pass", "cuts", "features", "forward", "gradients", "needs"]
__all__ += ["score", "vocabulary", "widened"]
