"""The side that learns: policy, critic, reference, optimizer, and what a forward pass brings."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from proxpo.logp import model_logp, score_features, token_logp
from proxpo.models import Policy
from proxpo.ops.shapes import Float, Int, Tensor
from proxpo.train.experience import Experience
from proxpo.train.prefix import shares_prompts, states_before
from proxpo.types import FIELDS, Recipe, State

VOCABULARY = {name for name, field in FIELDS.items() if field.last == "vocab"}
STATES = {"hidden"} | VOCABULARY  # fields read off the states before the head


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


def cuts(rows: int, size: int, device: torch.device) -> Iterator[Int[Tensor, " row"]]:
    """Row numbers of each micro-batch."""
    yield from torch.arange(rows, device=device).split(size)


def forward(
    learner: Learner,
    rows: Experience,
    *,
    how: Pass,
    model: nn.Module | None = None,
    without: frozenset[str] | set[str] = frozenset(),
) -> dict[str, Tensor]:
    """logp of the response tokens, and what else of the policy's numbers the recipe reads.

    Prompts run once for all their responses where that comes to the same; gradient transforms work
    in the model's own modules, on whole sequences. `without` names fields to leave out.
    """
    wanted = learner.recipe.needs() - without if model is None else set()
    own, model = model is None, model or learner.policy.model
    options = {"temperature": how.temperature, "entropy": "entropy" in wanted}
    shared = learner.transform is None and shares_prompts(model)
    find = _shared if shared else _whole
    states_wanted = own and (learner.critic is not None or bool(wanted & STATES))
    with learner.policy.autocast():
        found, states = find(model, rows, options, hidden=states_wanted)
        out = dict(found._asdict()) if options["entropy"] else {"logp": found}
        if wanted & VOCABULARY:
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


def widened(x: Tensor, tokens: int) -> Tensor:
    """Padded on the right to this many tokens."""
    behind = [0, 0] * (x.dim() - 2)
    return nn.functional.pad(x, (*behind, 0, tokens - x.shape[1]))


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


__all__ = [
    "VOCABULARY",
    "Learner",
    "Pass",
    "cuts",
    "features",
    "forward",
    "score",
    "vocabulary",
    "widened",
]
