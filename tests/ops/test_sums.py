"""Batch-wide sums when the batch is cut."""

import pytest
import torch
from helpers import close, f64

import proxpo
from proxpo import Batch
from proxpo.errors import ProxpoError
from proxpo.types import local


def part_of(*numbers: float) -> Batch:
    logp = f64([numbers])
    return Batch(logp=logp, mask=torch.ones_like(logp, dtype=torch.bool))


PARTS = [part_of(1, 2), part_of(3), part_of(4, 5, 6)]


def chained(part: Batch, all_sum: object, seen: list | None = None) -> torch.Tensor:
    """Mean, then variance around that mean: the second sum needs the first total."""
    total, n = all_sum(torch.stack([part.logp.sum(), f64(float(part.logp.numel()))]))
    mean = total / n
    squares = all_sum((part.logp - mean).square().sum()[None])[0]
    if seen is not None:
        seen.append((float(mean), float(squares / n)))
    return squares


def test_every_part_sees_the_totals() -> None:
    all_sum = proxpo.over_microbatches(chained, PARTS)
    for _ in range(2):  # a second epoch over the same cut
        seen: list = []
        for part in PARTS:
            chained(part, all_sum, seen)
        whole = torch.cat([part.logp[0] for part in PARTS])
        expected = (float(whole.mean()), float(whole.var(unbiased=False)))
        for found in seen:
            close(f64(found), f64(expected))


def test_sums_of_other_weights_are_refused() -> None:
    """A second update with the sums of the first: its statistics would be those of old weights."""
    all_sum = proxpo.over_microbatches(chained, PARTS)
    chained(PARTS[1], all_sum)
    with pytest.raises(ProxpoError, match="sum 1 of this loss is that of none of the 3 micro-b"):
        chained(part_of(4, 5, 6.01), all_sum)
    chained(PARTS[1], all_sum)
    # The first sum of one micro-batch, the second of another.
    all_sum(torch.stack([PARTS[0].logp.sum(), f64(2.0)]))
    with pytest.raises(ProxpoError, match="sum 2 of this loss"):
        all_sum((PARTS[2].logp - 3.5).square().sum()[None])


def test_a_loss_after_a_failed_one_is_refused() -> None:
    def failing(part: Batch, all_sum: object) -> None:
        all_sum(torch.stack([part.logp.sum(), f64(float(part.logp.numel()))]))
        raise KeyError("stop")

    all_sum = proxpo.over_microbatches(chained, PARTS)
    with pytest.raises(KeyError):
        failing(PARTS[0], all_sum)
    with pytest.raises(ProxpoError, match=r"sum 2 of this loss .* a call before it has failed"):
        chained(PARTS[0], all_sum)


def test_a_loss_without_statistics_is_run_once() -> None:
    calls = []

    def plain(part: Batch, all_sum: object) -> torch.Tensor:
        calls.append(part)
        return part.logp.sum()

    all_sum = proxpo.over_microbatches(plain, PARTS)
    assert len(calls) == len(PARTS)
    close(all_sum(f64([2.0])), f64([2.0]))


def test_scope_microbatch_stays_within_the_part() -> None:
    def scoped(part: Batch, all_sum: object) -> torch.Tensor:
        own = all_sum(part.logp.sum()[None], "microbatch")
        whole = all_sum(part.logp.sum()[None])
        return torch.cat([own, whole])

    all_sum = proxpo.over_microbatches(scoped, PARTS)
    found = [scoped(part, all_sum) for part in PARTS]
    close(torch.stack(found), f64([[3.0, 21.0], [3.0, 21.0], [15.0, 21.0]]))


def test_ranks_are_added_to_microbatches() -> None:
    def doubled(x: torch.Tensor, scope: str = "batch") -> torch.Tensor:
        return 2 * x  # as if another rank held the same

    def plain(part: Batch, all_sum: object) -> torch.Tensor:
        return all_sum(part.logp.sum()[None])

    all_sum = proxpo.over_microbatches(plain, PARTS, ranks=doubled)
    close(plain(PARTS[0], all_sum), f64([42.0]))


def test_totals_carry_no_gradient() -> None:
    leaf = f64([[1.0, 2.0]]).requires_grad_()
    all_sum = proxpo.over_microbatches(chained, [part_of(1, 2).replace(logp=leaf)])
    assert not all_sum(torch.stack([leaf.sum(), f64(2.0)])).requires_grad
    close(local(leaf), leaf)
