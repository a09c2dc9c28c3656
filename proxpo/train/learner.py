"""The side that learns: policy, critic, reference, optimizer, and the update on a mini-batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from proxpo.compose import count, policy_loss
from proxpo.logp import model_logp, token_logp
from proxpo.shapes import Int, Tensor
from proxpo.sums import over_microbatches
from proxpo.train.experience import Experience
from proxpo.train.models import Policy
from proxpo.train.prefix import shares_prompts, states_before
from proxpo.transforms import objective, per_response
from proxpo.types import ROWS, AllSum, Batch, Denominators, Loss, Metrics, Recipe, State, local


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
    """logp of the response tokens, and entropy and values where the recipe reads them.

    Prompts run once for all their responses where that comes to the same; gradient transforms work
    in the model's own modules, on whole sequences.
    """
    wanted = needs(learner.recipe)
    own, model = model is None, model or learner.policy.model
    options = {"temperature": how.temperature, "entropy": own and "entropy" in wanted}
    shared = learner.transform is None and shares_prompts(model)
    find = _shared if shared else _whole
    with learner.policy.autocast():
        found, states = find(model, rows, options, hidden=own and learner.critic is not None)
    out = dict(found._asdict()) if options["entropy"] else {"logp": found}
    if states is not None:
        # The critic does not move the policy.
        out["values"] = learner.critic(states.detach().float())[..., 0]
    if own and how.fresh:
        out["old_logp"] = out["logp"].detach()
    return out


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
        parts.append({k: nn.functional.pad(v, (0, width - v.shape[1])) for k, v in found.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def gradients(
    learner: Learner, recipe: Recipe, rows: Experience, batch: Batch, *, how: Pass, seed: int
) -> Metrics:
    """Backward of one mini-batch, micro-batch by micro-batch; the metrics of the whole.

    `batch` holds what is fixed for the rollout; the micro-batches share its denominators, so they
    add up to the gradient of the mini-batch in one piece.
    """
    batch = _narrow(batch, rows.mask.shape[1])
    parts = list(cuts(len(batch.mask), how.micro_batch, batch.mask.device))
    denominators = count(batch)
    all_sum = _sums(learner, recipe, rows, batch, parts, denominators, how)
    share = [float(batch.mask[part].sum()) for part in parts]
    totals: Metrics = {}
    for number, part in enumerate(parts):
        generator = torch.Generator(device="cpu").manual_seed((seed + number) % 2**63)
        options = {
            "denominators": denominators,
            "state": learner.state,
            "all_sum": all_sum,
            "generator": generator,
        }
        loss = _backward(learner, recipe, rows.rows(part), batch.rows(part), how, options)
        weight = share[number] / max(sum(share), 1.0)
        for name, value in loss.metrics.items():
            totals[name] = totals.get(name, 0.0) + weight * value.detach().float()
        totals["loss"] = totals.get("loss", 0.0) + loss.value.detach().float()
    return totals


def _backward(
    learner: Learner,
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    how: Pass,
    options: dict[str, Any],
) -> Loss:
    narrow = _narrow(batch, rows.mask.shape[1])
    if learner.transform is None:
        loss = policy_loss(recipe, narrow.replace(**forward(learner, rows, how=how)), **options)
        loss.value.backward()
        return loss
    if recipe.regularisers or recipe.value is not None:
        # Terms without an advantage: an ordinary backward of their own.
        now = narrow.replace(**forward(learner, rows, how=how))
        bare = recipe.replace(regularisers=(), value=None)
        extra = policy_loss(recipe, now, **options).value - policy_loss(bare, now, **options).value
        extra.backward()
    sequences = torch.where(
        rows.attention_mask, torch.arange(len(rows.mask), device=rows.mask.device)[:, None], -1
    )
    advantages = per_response(recipe, narrow)
    with learner.transform.applied(
        learner.policy.model, sequences=sequences, advantages=advantages, groups=rows.group
    ):
        found = forward(learner, rows, how=how)
        split = objective(recipe, narrow.replace(**found), **options)
        (-(split.weights * found["logp"]).sum()).backward()
    return split.loss


def _sums(
    learner: Learner,
    recipe: Recipe,
    rows: Experience,
    batch: Batch,
    parts: list[Tensor],
    denominators: Denominators,
    how: Pass,
) -> AllSum:
    """Statistics over all micro-batches, for recipes that ask for any; else nothing to do."""
    asked: list[Tensor] = []

    def probe(x: Tensor, scope: str = "batch") -> Tensor:
        asked.append(x)
        return x

    if len(parts) > 1:
        policy_loss(recipe, batch, denominators=denominators, state=learner.state, all_sum=probe)
    if not asked:
        return local
    found = score(learner, rows, how=how)
    pieces = [batch.replace(**found).rows(part) for part in parts]

    def run(piece: Batch, *, all_sum: AllSum) -> Loss:
        known: dict[str, Any] = {"denominators": denominators, "state": learner.state}
        return policy_loss(recipe, piece, all_sum=all_sum, **known)

    return over_microbatches(run, pieces)


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


__all__ = ["Learner", "Pass", "forward", "gradients", "needs", "score"]
