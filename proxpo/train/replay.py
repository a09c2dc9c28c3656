"""Choosing prompts: mini-batches of a rollout, and earlier rollouts mixed in or kept for later."""

import torch

from proxpo.ops.shapes import Int, Tensor
from proxpo.train.experience import Experience, join


def share_of(
    rows: Experience, shuffle: torch.Generator, parts: int, part: int
) -> Int[Tensor, " row"]:
    """Rows of the part-th share of the shuffled prompts; responses to a prompt stay together."""
    _, index = rows.group.unique(return_inverse=True)
    index = index.cpu()
    order = torch.randperm(int(index.max()) + 1, generator=shuffle)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    ranks = place[index]
    share = ranks * parts // len(order)
    chosen = (share == part).nonzero()[:, 0]
    return chosen[ranks[chosen].argsort(stable=True)].to(rows.group.device)


def any_of(rows: Experience, shuffle: torch.Generator, prompts: int) -> Int[Tensor, " row"]:
    """All rows of `prompts` prompts drawn at random."""
    groups, index = rows.group.unique(return_inverse=True)
    chosen = torch.randperm(len(groups), generator=shuffle)[:prompts].to(index.device)
    return torch.isin(index, chosen).nonzero()[:, 0]


def replaced(
    fresh: Experience, past: list[Experience], share: float, draw: torch.Generator
) -> Experience:
    """The rollout with a share of its prompts replaced by those of earlier ones."""
    prompts = len(fresh.group.unique())
    old = round(share * prompts)
    if not old or not past:
        return fresh
    earlier = join(past)
    kept = any_of(fresh, draw, prompts - old)
    return join([fresh.rows(kept), earlier.rows(any_of(earlier, draw, old))])


def mixture(
    fresh: Experience, past: list[Experience], share: float, draw: torch.Generator
) -> Experience:
    """Each prompt comes, with chance `share`, from one of the earlier rollouts, drawn evenly."""
    prompts = len(fresh.group.unique())
    if not past or not share:
        return fresh
    old = int((torch.rand(prompts, generator=draw) < share).sum())
    source = torch.randint(len(past), (old,), generator=draw)
    counts = [(fresh, prompts - old)]
    counts += [(one, int((source == i).sum())) for i, one in enumerate(past)]
    return join([rows.rows(any_of(rows, draw, count)) for rows, count in counts if count])


def remembered(
    past: list[Experience], fresh: Experience, *, samples: int = 0, rollouts: int = 0
) -> list[Experience]:
    """The rollouts to keep: the last `rollouts`, or as many as have `samples` rows."""
    found = [*past, fresh]
    most = max(samples, len(fresh.mask)) if samples else 0
    while found and len(found) > rollouts and sum(len(one.mask) for one in found) > most:
        found.pop(0)
    return found


__all__ = ["any_of", "mixture", "remembered", "replaced", "share_of"]
