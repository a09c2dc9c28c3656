"""The same gradients from proxpo's own loop, given the micro-batches a TRL run went through."""

from typing import Any

import torch
from torch import nn

from proxpo.compose import prepare
from proxpo.models import Policy
from proxpo.train.batch import TrainingBatch
from proxpo.train.experience import Experience
from proxpo.train.minibatch import gradients
from proxpo.train.scoring import Learner, LogpOptions, score
from proxpo.types import Batch, Recipe


def experience(parts: list[dict[str, Any]]) -> Experience:
    """TRL's micro-batches, one after the other, as rows of a rollout."""
    rows = {
        name: torch.cat([part[name] for part in parts])
        for name in parts[0]
        if _has_rows(parts, name)
    }
    mask = rows["completion_mask"].bool()
    return Experience(
        input_ids=torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
        attention_mask=torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1).bool(),
        mask=mask,
        rollout_logp=torch.zeros(mask.shape, dtype=rows["rewards"].dtype),
        rewards=rows["rewards"],
        correct=torch.zeros(len(mask), dtype=torch.bool),
        truncated=torch.zeros(len(mask), dtype=torch.bool),
        group=rows["group"],
        version=torch.zeros(len(mask), dtype=torch.long),
    )


def _has_rows(parts: list[dict[str, Any]], name: str) -> bool:
    return all(part[name].dim() > 0 for part in parts)


def own_gradients(
    model: nn.Module, recipe: Recipe, parts: list[dict[str, Any]]
) -> tuple[dict[str, torch.Tensor], Any]:
    """Gradients of one optimizer step on `parts`, and the transform after it."""
    for module in (model, model.get_base_model() if hasattr(model, "get_base_model") else model):
        vars(module).pop("forward", None)  # without TRL's fused head
    policy = Policy(model=model, tokenizer=None, eos_ids=[2], pad_id=0, name="tiny", context=256)
    transform = recipe.gradient.apply() if recipe.gradient else None
    learner = Learner(
        policy=policy,
        recipe=recipe,
        optimizer=torch.optim.SGD(model.parameters()),
        transform=transform,
        state=recipe.init_state(),
    )
    rows = experience(parts)
    options = LogpOptions(
        temperature=1.0,
        micro_batch=len(parts[0]["rewards"]),
        fields=frozenset(recipe.needs()),
    )
    current = score(learner, rows, options)
    logp = current["logp"]
    given = {"old_logp": logp, "ref_logp": logp, "rewards": rows.rewards, "group": rows.group}
    ready = prepare(recipe, Batch(**current, mask=rows.mask, **given))
    model.zero_grad()
    gradients(learner, recipe, TrainingBatch(rows, ready.batch), options, seed=0)
    if transform is not None:
        transform.step()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, transform


EXACT = 1e-9
FUSED = 1e-6  # without a transform log-probabilities are TRL's, whose fused head adds in float32


def agree(
    found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *, to: float = EXACT
) -> None:
    """Each parameter's gradient, in float64, to that share of its length."""
    assert found.keys() == want.keys()
    assert max(float(x.abs().max()) for x in want.values()) > 1e-3
    for name, grad in want.items():
        assert found[name].dtype == torch.float64
        assert float((found[name] - grad).norm()) <= to * float(grad.norm()) + 1e-15, name
