"""Positions of one micro-batch spread over the ranks of a group (sequence parallelism).

Every rank holds some positions of the sequences, and V_i = Σ_ranks V_i^(rank). Lengths and kernels
are of the whole V_i: sums over positions are added over the group, and position gradients that
others multiply with are fetched. What a rank returns is its part Σ_i w_i V_i^(rank), so that the
gradients of the group add up to the gradient. All ranks make the same calls in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Int, Shaped, Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's share of the positions of its group."""

    group: Any  # a ProcessGroup, which builds of torch without distributed do not have
    seq: Int[Tensor, " all"]  # sequence numbers of all positions of the group, alike on every rank
    place: Int[Tensor, " pos"]  # indices of this rank's positions among them

    @cached_property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def _row(self) -> Int[Tensor, " all"]:
        """The local row of every position of the group, -1 where another rank has it."""
        row = torch.full_like(self.seq, -1)
        row[self.place] = torch.arange(len(self.place), device=row.device)
        return row

    def total(self, x: Shaped[Tensor, "*any"]) -> Shaped[Tensor, "*any"]:
        """Σ x over the ranks."""
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def fetch(
        self, columns: Sequence[Shaped[Tensor, "pos ..."]], index: Int[Tensor, " some"]
    ) -> list[Tensor]:
        """Rows of position-wise tensors of any rank: one message per dtype."""
        row = self._row[index]
        mine = [_rows_or_zero(x, row) for x in columns]
        for kind in dict.fromkeys(x.dtype for x in mine):
            same = [place for place, x in enumerate(mine) if x.dtype == kind]
            flat = torch.cat([mine[place].flatten() for place in same])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([mine[place].numel() for place in same])
            for place, part in zip(same, parts):
                mine[place] = part.view_as(mine[place])
        return mine

    def repeat(self, extra: int) -> "Shard":
        """Every position `extra` times over."""
        place = self.place[:, None] * extra + torch.arange(extra, device=self.place.device)
        return Shard(self.group, self.seq.repeat_interleave(extra), place.flatten())

    @staticmethod
    def join(shards: "list[Shard]") -> "Shard":
        """The positions of several calls of one module, one after the other."""
        starts = accumulate((shard.seq.numel() for shard in shards), initial=0)
        place = torch.cat([shard.place + start for shard, start in zip(shards, starts)])
        return Shard(shards[0].group, torch.cat([shard.seq for shard in shards]), place)

    def routed(
        self, experts: Int[Tensor, "pos k"], order: Int[Tensor, " pair"], sizes: list[int]
    ) -> "list[Shard]":
        """Shards of the (position, expert) pairs of each expert, sorted by `order` and `sizes`."""
        width = experts.shape[1]
        everyone = torch.arange(self.seq.numel(), device=experts.device)
        (flat,) = (x.flatten() for x in self.fetch([experts], everyone))
        sorting = torch.argsort(flat, stable=True)
        rank = torch.empty_like(sorting)
        rank[sorting] = torch.arange(len(rank), device=rank.device)
        pairs = self.place[:, None] * width + torch.arange(width, device=rank.device)
        mine = rank[pairs.flatten()[order]].split(sizes)
        counts = torch.bincount(flat, minlength=len(sizes)).tolist()
        position = sorting.div(width, rounding_mode="floor").split(counts)
        starts = accumulate(counts, initial=0)
        return [
            Shard(self.group, self.seq[all_], place - start)
            for all_, place, start in zip(position, mine, starts)
        ]


def _rows_or_zero(x: Tensor, row: Int[Tensor, " some"]) -> Tensor:
    """x[row], and 0 where row is -1."""
    out = x.new_zeros(len(row), *x.shape[1:])
    if not len(x):
        return out
    mine = (row >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(mine, x[row.clamp(min=0)], out)


def gather_shard(
    group: Any, seq: Int[Tensor, " pos"], shared: Sequence[Shaped[Tensor, " row"]]
) -> Shard:
    """Shard of this rank; `shared` (advantages, groups) must be alike on all ranks of the group."""
    bits = torch.cat([x.double().view(torch.int64) for x in shared])
    lengths = torch.tensor([len(seq), len(bits)], device=seq.device)
    sizes, widths = _gathered(lengths, group).T.tolist()
    longest = max(sizes)
    alike = len(set(widths)) == 1
    if alike:
        padded = torch.nn.functional.pad(seq, (0, longest - len(seq)))
        everyone = _gathered(torch.cat([padded, bits]), group)
        alike = bool((everyone[:, longest:] == bits).all())
    if not alike:
        raise ProxpoError(
            "gradients.applied: the ranks of `token_group` were given different advantages or "
            "groups: each must know all sequences of the micro-batch, in the same order"
        )
    start = sum(sizes[: dist.get_rank(group)])
    place = torch.arange(start, start + len(seq), device=seq.device)
    whole = torch.cat([row[:size] for row, size in zip(everyone, sizes)])
    return Shard(group, whole, place)


def _gathered(x: Int[Tensor, " some"], group: Any) -> Int[Tensor, "rank some"]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)
