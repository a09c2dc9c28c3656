"""A generation batch of TRL as proxpo sees it: Batch fields, then the group logic of a recipe.

TRL spreads the completions of a prompt over processes and shuffles them over micro-batches. What
concerns a group is therefore settled before, on all processes alike: the few numbers it needs are
gathered, `prepare` runs on the whole batch, and each process keeps its own rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proxpo.compose import prepare
from proxpo.ops.shapes import Bool, Float, Tensor
from proxpo.types import Batch, Context, Metrics, Recipe

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class GenerationBatch:
    """A prepared generation batch: `whole` to count with, `local` to train on.

    whole: mask, rewards, groups and what stages with memory read, of all processes
    local: every field of this process's rows, the first of which is row `first` of the whole
    version: optimizer steps the sampling policy had made
    blank: completions of all processes without a trained token, as TRL hands them over
    """

    whole: Batch
    local: Batch
    blank: Bool[Tensor, " seq"]
    first: int
    version: int
    metrics: Metrics


def prepared(
    recipe: Recipe,
    fields: Mapping[str, Tensor],
    ctx: Context,
    *,
    rewards: Tensor,
    group_size: int,
    first: int,
    version: int,
    gather: Gather,
) -> GenerationBatch:
    """Applies rewards, filters and advantages of a recipe to the generation batch of all processes.

    fields: rows of this process, by Batch name; rewards: of all processes, in the order of rows.
    """
    shared = {n: gather(x) for n, x in fields.items() if n in fields_before_update(recipe)}
    shape = shared["mask"].shape
    whole = Batch(
        logp=rewards.new_zeros(shape),
        rewards=rewards,
        group=torch.arange(len(rewards), device=rewards.device) // group_size,
        **shared,
    )
    ready = prepare(recipe, whole, ctx)
    rows, tokens = fields["mask"].shape
    local = ready.batch.rows(slice(first, first + rows))
    narrow = {n: x[:, :tokens] for n, x in local.items() if x.dim() > 1}
    others = {n: x for n, x in fields.items() if n not in shared}
    local = local.replace(**narrow | others).clean(*others, "logp")
    counted = {n: getattr(ready.batch, n) for n in ("logp", "mask", "rewards", "group")}
    kept = {n: getattr(ready.batch, n) for n in shared if n not in counted}
    return GenerationBatch(
        whole=Batch(**counted, **kept),
        local=local,
        blank=~shared["mask"].any(dim=1),
        first=first,
        version=version,
        metrics=ready.metrics,
    )


def fields_before_update(recipe: Recipe) -> set[str]:
    """The mask, and batch fields that group logic and stages with memory read."""
    advantage = [] if recipe.advantage is None else [recipe.advantage]
    group_logic = [*recipe.reward, *recipe.filter, *advantage, *recipe.prune]
    memory = [stage for _, stage in recipe.stages() if stage.prepare or stage.update]
    return {"mask"}.union(*(stage.needs for stage in [*group_logic, *memory]))


def batch_fields(
    output: Mapping[str, Any],
    *,
    old: Float[Tensor, "seq tok"] | None,
    entropy: Float[Tensor, "seq tok"] | None,
    ends: Sequence[int],
    proximal: bool,
) -> dict[str, Tensor]:
    """Completions of this process, as TRL returns them, by Batch name.

    old, entropy: by the policy that starts the updates, where they are known; ends: tokens a whole
    completion ends with; proximal: `old` is the proximal policy, the sampler's numbers are the old
    """
    mask = trained_tokens(output)
    rollout: Any = output.get("sampling_per_token_logps")
    fields = {
        "mask": mask,
        "tokens": output["completion_ids"],
        "lag": torch.zeros_like(mask, dtype=torch.long),
        "truncated": truncated(output, ends),
        "old_logp": old,
        "entropy": entropy,
        "rollout_logp": rollout,
        "ref_logp": output.get("ref_per_token_logps"),
    }
    if has_unscored_tokens(output):  # what vLLM could not score gets the trainer's own number
        fields["rollout_logp"] = rollout.where(~rollout.isnan(), old)
    if proximal:
        fields["prox_logp"] = old
        fields["old_logp"] = old if rollout is None else fields["rollout_logp"]
    return {name: value for name, value in fields.items() if value is not None}


def has_unscored_tokens(output: Mapping[str, Any]) -> bool:
    """True if the sampler has left tokens without a log-probability."""
    rollout = output.get("sampling_per_token_logps")
    return rollout is not None and bool((rollout.isnan() & trained_tokens(output)).any())


def trained_tokens(inputs: Mapping[str, Any]) -> Bool[Tensor, "seq tok"]:
    """Mask of the tokens of completions that no tool has written."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def truncated(inputs: Mapping[str, Any], ends: Sequence[int]) -> Bool[Tensor, " seq"]:
    """Completions whose last token is none of `ends`."""
    ids, lengths = inputs["completion_ids"], inputs["completion_mask"].sum(dim=1)
    last = ids.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
    return ~torch.isin(last, torch.tensor(ends, device=ids.device))


def weighted_rewards(
    scores: Float[Tensor, "seq function"], weights: Float[Tensor, " function"]
) -> Float[Tensor, " seq"]:
    """One reward per completion: the weighted sum of its scores, NaN where it has none."""
    unscored = scores.isnan().all(dim=1)
    total = (scores * weights.to(scores)).nansum(dim=1)
    return total.masked_fill(unscored, torch.nan)


__all__ = [
    "GenerationBatch",
    "batch_fields",
    "fields_before_update",
    "has_unscored_tokens",
    "prepared",
    "trained_tokens",
    "weighted_rewards",
]
