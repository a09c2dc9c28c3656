"""Batch-wide sums when the batch is cut: over data-parallel ranks and over micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from proxpo.errors import ProxpoError
from proxpo.ops.shapes import Tensor
from proxpo.types import AllSum, Batch, Reach, local


def over_ranks(group: Any = None) -> AllSum:
    """Sum over the processes of a torch.distributed group.

    Losses built with it share global denominators: the gradients of the ranks are to be ADDED.
    Engines that average gradients over D ranks multiply each rank's loss by D.
    """

    def all_sum(x: Tensor, scope: Reach = "batch") -> Tensor:
        if scope == "rank":
            return x
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    return all_sum


def over_microbatches(
    loss: Callable[..., Any], microbatches: Sequence[Batch], *, ranks: AllSum = local
) -> AllSum:
    """An `all_sum` that knows the totals of all `microbatches`, for statistics of the whole batch.

    `loss(batch, all_sum=...)` is run without gradient over the micro-batches, once for every
    statistic a recipe asks for, each time with the totals known so far; the k-th call inside a
    loss then answers with the k-th total. Recipes without batch statistics cost one such run.

    The totals are those of the weights they were computed with: a loss of other weights, or one
    that begins in the middle of the calls after an error, is refused.
    """
    return microbatch_sums(loss, microbatches, ranks=ranks, verify=True)


def microbatch_sums(
    loss: Callable[..., Any], microbatches: Sequence[Batch], *, ranks: AllSum, verify: bool
) -> AllSum:
    """`over_microbatches`; without `verify` for a trainer, whose two passes may round otherwise."""
    totals: list[Tensor] = []
    recorded: list[list[Tensor]] = []
    with torch.no_grad():
        while True:
            probes = [_Probe(totals, ranks) for _ in microbatches]
            for probe, microbatch in zip(probes, microbatches):
                loss(microbatch, all_sum=probe)
            if any(probe.next_sum is None for probe in probes):
                return OverMicrobatches(totals, ranks, recorded if verify else None)
            parts = [probe.next_sum for probe in probes if probe.next_sum is not None]
            totals.append(ranks(torch.stack(parts).sum(0), probes[0].scope))
            recorded.append([part.clone() for part in parts])


class _Probe:
    """Answers with the known totals and keeps the first sum whose total is not known yet."""

    def __init__(self, totals: list[Tensor], ranks: AllSum):
        self.totals, self.ranks, self.calls = list(totals), ranks, 0
        self.next_sum: Tensor | None = None
        self.scope: Reach = "batch"

    def __call__(self, x: Tensor, scope: Reach = "batch") -> Tensor:
        if scope == "microbatch":
            return self.ranks(x, scope)
        self.calls += 1
        if self.calls <= len(self.totals):
            return self.totals[self.calls - 1]
        if self.calls == len(self.totals) + 1:
            self.next_sum, self.scope = x.detach(), scope
        return x


class OverMicrobatches:
    """Answers call k of each loss with total k; a loss makes the same calls in the same order.

    recorded: the part of every micro-batch in every total, one of which each call must bring
    """

    def __init__(
        self, totals: list[Tensor], ranks: AllSum, recorded: list[list[Tensor]] | None
    ) -> None:
        self.totals, self.ranks, self.recorded, self.calls = totals, ranks, recorded, 0
        self._alike: list[int] = []  # micro-batches with the parts that this loss has brought

    def __call__(self, x: Tensor, scope: Reach = "batch") -> Tensor:
        if scope == "microbatch" or not self.totals:
            return self.ranks(x, scope)
        call = self.calls % len(self.totals)
        if self.recorded is not None:
            self._compare(x.detach(), call, self.recorded[call])
        self.calls += 1
        return self.totals[call]

    def _compare(self, x: Tensor, call: int, parts: list[Tensor]) -> None:
        """Refuses a sum that no micro-batch has had at this call, up to rounding."""
        before = self._alike if call else range(len(parts))
        small = 1e-6 if x.dtype == torch.float64 else 1e-2  # log-probabilities of half precision
        near = [n for n in before if x.shape == parts[n].shape]
        self._alike = [n for n in near if torch.allclose(x, parts[n].to(x), small, small, True)]
        if not self._alike:
            self.calls = 0
            raise ProxpoError(
                f"over_microbatches: sum {call + 1} of this loss is that of none of the "
                f"{len(parts)} micro-batches: the weights have changed since, or a call before it "
                "has failed; make new sums for every optimizer step"
            )


__all__ = ["microbatch_sums", "over_microbatches", "over_ranks"]
