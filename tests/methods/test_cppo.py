import math
from typing import Any

import pytest
import torch
from helpers import advantages, close, f64, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    clipped,
    groups,
    k3,
    kept,
    plus,
    ratio,
    seq_mean_token_mean,
    token_mean,
    z_scores,
)
from proxpo import Batch
from proxpo.types import Context


def pruned(b: Batch, *, rate: float, pool: str = "question", largest: bool = False) -> Terms:
    """The clipped terms of the kept responses, advantages from the full groups."""
    a = z_scores(b, eps=1e-4)
    size = {i: abs(value) for (i, _), value in a.items()}
    pools = groups(b).values() if pool == "question" else [list(range(len(b.mask)))]
    chosen: set[int] = set()
    for members in pools:
        there = [i for i in members if i in size]
        order = sorted(there, key=lambda i: (size[i] if largest else -size[i], i))
        chosen |= set(order[: math.floor(len(there) * (1 - rate) + 1e-9)])
    left = kept(b, lambda i, t: i in chosen)
    return left, clipped(ratio(left), a, 0.2, 0.2)


def cppo(b: Batch) -> Any:
    left, x = pruned(b, rate=0.5)
    return seq_mean_token_mean(plus(x, (0.04, k3(left, left.ref_logp))), left)


def cppo_batch(b: Batch) -> Any:
    left, x = pruned(b, rate=0.3, pool="batch")
    return token_mean(plus(x, (0.04, k3(left, left.ref_logp))), left)


def cppo_largest(b: Batch) -> Any:
    left, x = pruned(b, rate=1 / 3, largest=True)
    return seq_mean_token_mean(x, left)


CASES = {
    "cppo": Case("cppo", {}, cppo),
    "cppo-largest": Case(
        "cppo", {"metric": "largest", "rate": 1 / 3, "kl_coef": 0.0}, cppo_largest
    ),
    "cppo-batch": Case(
        "cppo", {"pool": "batch", "rate": 0.3, "aggregate": "token_mean"}, cppo_batch
    ),
}


SLUG = "cppo"


def distinct(seed: int = 1, **options: int) -> Batch:
    """Rewards without ties of |A|: squares over the row numbers, shuffled."""
    batch = make_batch(seed, **options)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    return batch.replace(rewards=order.double() ** 2 / 50)


def kept_rows(batch: Batch, **options: object) -> torch.Tensor:
    return proxpo.prepare(method(SLUG, **options), batch).batch.mask.any(dim=1)


@pytest.mark.checks(SLUG, "P = 0 is GRPO")
@pytest.mark.parametrize("pool", ["question", "batch"])
def test_no_pruning(pool: str) -> None:
    batch = make_batch(1)
    base = method("grpo", kl_coef=0.04, eps=1e-4)
    found = loss_and_gradients(method(SLUG, rate=0, pool=pool), batch)
    for ours, theirs in zip(found, loss_and_gradients(base, batch)):
        close(ours, theirs)


@pytest.mark.checks(SLUG, "pruned: gradient exactly 0; kept: the advantage of the full group")
def test_gradient() -> None:
    batch = distinct(size=4)
    rows = kept_rows(batch)
    assert rows.sum() == 6
    grad = policy_gradient(method(SLUG), batch)
    assert grad[~rows].eq(0).all()
    base = method("grpo", eps=1e-4, kl_coef=0.04)
    close(advantages(method(SLUG), batch)[rows], advantages(base, batch)[rows])
    close(grad[rows], policy_gradient(base, batch)[rows] * 2)  # 1/k instead of 1/G


@pytest.mark.checks(SLUG, "the kept are those of largest |A|, per question or pooled; both signs")
@pytest.mark.parametrize("pool", ["question", "batch"])
@pytest.mark.parametrize("rate", [0.25, 0.5, 0.75])
def test_which(pool: str, rate: float) -> None:
    batch = distinct(2, size=4)
    a = advantages(method("grpo", eps=1e-4), batch)
    size = a.abs().amax(1)
    rows = kept_rows(batch, rate=rate, pool=pool)
    pools = batch.group.unique() if pool == "question" else [None]
    for one in pools:
        members = torch.ones_like(rows) if one is None else batch.group == one
        assert rows[members].sum() == round(int(members.sum()) * (1 - rate))
        assert size[members & rows].min() > size[members & ~rows].max()
    if rate == 0.25:
        assert (a[rows] > 0).any()
        assert (a[rows] < 0).any()


@pytest.mark.checks(SLUG, "metric=largest keeps the complement at P = 1/2")
@pytest.mark.parametrize("pool", ["question", "batch"])
def test_complement(pool: str) -> None:
    batch = distinct(3, size=4)
    rows = kept_rows(batch, pool=pool)
    assert torch.equal(kept_rows(batch, pool=pool, metric="largest"), ~rows)


@pytest.mark.checks(SLUG, "scaling the rewards of a group leaves the kept set")
def test_scale() -> None:
    batch = distinct(4, size=4)
    scaled = batch.replace(rewards=torch.where(batch.group == 1, 7 * batch.rewards, batch.rewards))
    assert torch.equal(kept_rows(scaled), kept_rows(batch))


@pytest.mark.checks(SLUG, "the divisor counts the kept alone: responses, or their tokens")
def test_divisor() -> None:
    batch = distinct(5, size=4)
    rows = kept_rows(batch)
    alone = batch.replace(advantages=advantages(method(SLUG), batch)).rows(rows.nonzero()[:, 0])
    for options in ({}, {"aggregate": "token_mean"}):
        found = loss_and_gradients(method(SLUG, **options), batch)[0]
        base = method("grpo", kl_coef=0.04, eps=1e-4, **options)
        close(found, loss_and_gradients(base, alone)[0])


def test_one_released_version_rounds_what_it_removes() -> None:
    """Of 3 at P = 0.5, ⌊1.5⌋ = 1 is kept, or 1 is removed; whole numbers leave no choice."""
    batch = make_batch(1)  # three groups of three
    for rate, left in ((0.5, 6), (1 / 3, 6), (2 / 3, 3)):
        made = method("cppo", rate=rate, floor="removed")
        assert proxpo.prepare(made, batch).ctx.counts.sequences == left
    assert proxpo.prepare(method("cppo", rate=0.5), batch).ctx.counts.sequences == 3


def test_pooled_pruning_drops_equal_rewards_first() -> None:
    batch = distinct(6, size=4)
    batch = batch.replace(rewards=torch.where(batch.group == 2, 1.0, batch.rewards))
    pooled = kept_rows(batch, pool="batch", rate=1 / 3)
    assert torch.equal(pooled, batch.group != 2)
    assert kept_rows(batch, pool="question")[batch.group == 2].sum() == 2


def test_permuting_responses_permutes_the_kept() -> None:
    batch = distinct(7, size=4)
    order = torch.randperm(len(batch.mask))
    assert torch.equal(kept_rows(batch.rows(order)), kept_rows(batch)[order])


def test_random_draws_from_the_generator() -> None:
    batch, made = distinct(8, size=4), method(SLUG, metric="random")

    def drawn(seed: int) -> torch.Tensor:
        ctx = Context(generator=torch.Generator().manual_seed(seed))
        return (made.prune[0].apply(batch, ctx)[0] & batch.mask).any(1)

    generator = torch.Generator().manual_seed(1)
    ready = proxpo.prepare(made, batch, Context(generator=generator)).batch
    assert torch.equal(drawn(1), ready.mask.any(1))
    found = torch.stack([drawn(seed) for seed in range(200)]).double()
    assert found.sum(1).eq(6).all()
    assert (found.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(200)


def test_nothing_kept_is_nothing_learnt() -> None:
    value, grads = loss_and_gradients(method(SLUG, rate=0.9), distinct(9, size=4))
    assert value == 0
    assert grads["logp"].eq(0).all()


def test_allocation_and_use_in_other_recipes() -> None:
    assert method(SLUG, rate=0.75).prune[0].options["prompt_factor"] == 4
    assert method(SLUG, prompt_factor=1).prune[0].options["prompt_factor"] == 1
    made = method("p3o", **{"prune": "largest_advantages", "prune.rate": 0.5, "reward": "dither"})
    batch = distinct(1, size=4)
    ready = proxpo.prepare(made, batch, Context(generator=torch.Generator().manual_seed(0)))
    assert ready.batch.mask.any(1).sum() == 6
    for options in ({"rate": 1.0}, {"prompt_factor": 0.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            method(SLUG, **options)


def test_advantages_given_per_response() -> None:
    batch = distinct(1, size=4).replace(advantages=f64([3, -2, 1, 0.5] * 3))
    assert kept_rows(batch).tolist() == [True, True, False, False] * 3
