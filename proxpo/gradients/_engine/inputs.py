"""Checks of the tensors that a block is opened with, and the share of them on other ranks."""

from typing import Any

import torch
import torch.distributed as dist

from proxpo.errors import ProxpoError
from proxpo.gradients._engine.padded_rows import check_advantages
from proxpo.gradients._engine.session import Rule
from proxpo.gradients._engine.shard import Shard, gather_shard
from proxpo.ops.shapes import Tensor

_WHERE = "gradients.applied: "


def by_prompt(rule: Rule) -> bool:
    """True where sequences of one prompt interact."""
    return getattr(rule, "group_by", None) == "prompt"


def from_head(rule: Rule) -> bool:
    """True where the head's lengths give each response one weight for all parameters."""
    return getattr(rule, "scope", "layer") == "head"


def check_tensors(rule: Rule, sequences: Tensor, advantages: Tensor, groups: Tensor | None) -> None:
    """Refuses what is no tensor, and tensors of a wrong dtype or shape."""
    for name, value in {"sequences": sequences, "advantages": advantages, "groups": groups}.items():
        if not isinstance(value, Tensor) and (name != "groups" or value is not None):
            raise ProxpoError(f"{_WHERE}`{name}` must be a tensor, got {type(value).__name__}")
    if sequences.is_floating_point() or sequences.dtype == torch.bool or sequences.numel() == 0:
        raise ProxpoError(
            f"{_WHERE}`sequences` must hold whole numbers shaped like input_ids (the sequence of "
            f"each position, -1 for padding), got {sequences.dtype} of {tuple(sequences.shape)}"
        )
    if advantages.dim() != 1 or not advantages.is_floating_point():
        raise ProxpoError(
            f"{_WHERE}`advantages` must be one float per sequence, got {advantages.dtype} of shape "
            f"{tuple(advantages.shape)}"
        )
    if by_prompt(rule) and (groups is None or groups.shape != advantages.shape):
        got = "none" if groups is None else f"shape {tuple(groups.shape)}"
        raise ProxpoError(
            f"{_WHERE}group_by='prompt' needs `groups`, one prompt number for each of the "
            f"{advantages.numel()} sequences, got {got}"
        )


def check_values(sequences: Tensor, advantages: Tensor, shard: Shard | None) -> None:
    """Refuses wrong values, on whichever rank of the shard they are.

    Any row of padded sequences may hold padding alone, the last one too.
    """
    low, high = (int(x) for x in torch.aminmax(sequences if shard is None else shard.seq))
    count = advantages.numel()
    by_row = sequences.dim() == 2 and len(sequences) == count
    if low < -1 or (high + 1 != count and not (by_row and 0 <= high < count)):
        raise ProxpoError(
            f"{_WHERE}`sequences` numbers {low}..{high}, which asks for {high + 1} advantages "
            f"(padding is -1), got {count}"
        )
    check_advantages(advantages)


def shard(
    rule: Rule,
    sequences: Tensor,
    advantages: Tensor,
    groups: Tensor | None,
    token_group: Any,
    device: torch.device,
) -> Shard | None:
    """Shard of this rank in a token group; None where this rank holds everything."""
    if token_group is None or dist.get_world_size(token_group) == 1:
        return None
    if not getattr(rule, "spreads", False):
        raise ProxpoError(
            f"{_WHERE}`token_group` is for isopo with scope=layer and isopo_ntk: other transforms "
            "need every sequence whole on one rank"
        )
    shared = [x.detach().to(device) for x in (advantages, groups) if x is not None]
    numbers = sequences.reshape(-1).to(device).long()
    return gather_shard(token_group, numbers, shared)


def first_rank(token_group: Any) -> int:
    """Rank that seeds the draws: ranks that share sequences share them."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    return dist.get_rank() if token_group is None else dist.get_global_rank(token_group, 0)
