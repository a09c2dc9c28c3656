"""One generation batch as proxpo sees it: advantages and masks of whole groups, then its cuts.

TRL spreads the completions of a prompt over processes and shuffles them over micro-batches. What
concerns a group is therefore settled before, on all processes alike: the few numbers it needs are
gathered, `prepare` runs on the whole batch, and each process keeps its own rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from proxpo.compose import count, prepare, tokens_of_group
from proxpo.ops.shapes import Int, Tensor
from proxpo.types import Batch, Clock, Context, Denominators, Metrics, Recipe, States

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A prepared generation batch: `whole` to count with, `mine` to train on.

    whole: mask, rewards, groups and what stages with memory read, of all processes
    mine: every field of this process's rows, the first of which is row `first` of the whole
    version: optimizer steps the sampling policy had made
    """

    whole: Batch
    mine: Batch
    first: int
    version: int
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of one optimizer step, on all processes, and the counts they are divided by."""

    rollout: Rollout
    denominators: Denominators
    group_tokens: Int[Tensor, " seq"]

    def part(self, rows: Int[Tensor, " row"]) -> Batch:
        """A micro-batch of this process, by the numbers its rows have in the whole."""
        batch = self.rollout.mine.rows(rows - self.rollout.first)
        return batch.replace(group_tokens=self.group_tokens[rows])


def early(recipe: Recipe) -> set[str]:
    """Batch fields that are read before the update: by group logic and by stages with memory."""
    advantage = [] if recipe.advantage is None else [recipe.advantage]
    group_logic = [*recipe.reward, *recipe.filter, *advantage, *recipe.prune]
    memory = [one for _, one in recipe.stages() if one.prepare or one.update]
    return {name for stage in [*group_logic, *memory] for name in stage.needs}


def prepared(
    recipe: Recipe,
    fields: Mapping[str, Tensor],
    *,
    rewards: Tensor,
    group_size: int,
    first: int,
    version: int,
    gather: Gather,
    states: States,
    noise: torch.Generator,
    clock: Clock,
) -> Rollout:
    """The recipe's view of a generation batch.

    fields: rows of this process, by Batch name; rewards: of all processes, in the order of rows.
    """
    shared = {n: gather(x) for n, x in fields.items() if n in early(recipe) | {"mask"}}
    shape = shared["mask"].shape
    whole = Batch(
        logp=rewards.new_zeros(shape),
        rewards=rewards,
        group=torch.arange(len(rewards), device=rewards.device) // group_size,
        **shared,
    )
    ready = prepare(recipe, whole, Context(states=states, generator=noise, clock=clock))
    rows, tokens = fields["mask"].shape
    mine = ready.batch.rows(slice(first, first + rows))
    narrow = {n: x[:, :tokens] for n, x in mine.items() if x.dim() > 1}
    local = {n: x for n, x in fields.items() if n not in shared}
    mine = mine.replace(**narrow | local).clean(*local, "logp")
    counted = {n: getattr(ready.batch, n) for n in ("logp", "mask", "rewards", "group")}
    kept = {n: getattr(ready.batch, n) for n in shared if n not in counted}
    return Rollout(
        whole=Batch(**counted, **kept),
        mine=mine,
        first=first,
        version=version,
        metrics=ready.metrics,
    )


def window(rollout: Rollout, rows: Int[Tensor, " row"]) -> Window:
    """The optimizer step on these rows of the whole: its counts, whatever they are cut into."""
    cut = rollout.whole.rows(rows)
    tokens = torch.zeros(len(rollout.whole.mask), dtype=torch.long, device=rows.device)
    return Window(
        rollout=rollout,
        denominators=count(cut),
        group_tokens=tokens.index_copy(0, rows, tokens_of_group(cut)),
    )


__all__ = ["Rollout", "Window", "early", "prepared", "window"]
