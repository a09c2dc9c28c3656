import math
from typing import Any

import pytest
import torch
from helpers import close, f64, loss_and_gradients, make_batch, method, policy_gradient

from methods._case import Case
from methods.loops import exp, groups, mean, number, row
from proxpo import Batch
from proxpo.ops.pairs import best_and_worst


def pair_margins(b: Batch, *, averaged: bool = False) -> list[Any]:
    out = []
    for members in groups(b).values():
        best = max(members, key=lambda i: (number(b.rewards[i]), -i))
        worst = min(members, key=lambda i: (number(b.rewards[i]), i))
        if b.rewards[best] > b.rewards[worst]:
            h = [sum(b.logp[i, t] - number(b.ref_logp[i, t]) for t in row(b, i))
                 / (len(row(b, i)) if averaged else 1) for i in (best, worst)]  # fmt: skip
            out.append(h[0] - h[1])
    return out


def dpo(b: Batch, *, smoothing: float = 0.0, robust: bool = False) -> torch.Tensor:
    terms = []
    for h in pair_margins(b):
        agree, oppose = torch.log(1 + exp(-0.1 * h)), torch.log(1 + exp(0.1 * h))
        if robust:
            x = ((1 - smoothing) * agree - smoothing * oppose) / (1 - 2 * smoothing)
        else:
            x = (1 - smoothing) * agree + smoothing * oppose
        terms.append(x)
    return mean(terms)


def ipo(b: Batch, *, averaged: bool) -> torch.Tensor:
    return mean([(h - 1 / (2 * 0.1)) ** 2 for h in pair_margins(b, averaged=averaged)])


CASES = {
    "dpo": Case("dpo", {}, dpo),
    "dpo-smooth": Case("dpo", {"label_smoothing": 0.2}, lambda b: dpo(b, smoothing=0.2)),
    "dpo-robust": Case(
        "dpo",
        {"label_smoothing": 0.2, "form": "robust"},
        lambda b: dpo(b, smoothing=0.2, robust=True),
    ),
    "dpo-ipo": Case("dpo", {"form": "ipo"}, lambda b: ipo(b, averaged=True)),
    "dpo-ipo-sum": Case(
        "dpo", {"form": "ipo", "ipo_mean": False}, lambda b: ipo(b, averaged=False)
    ),
}


def pair(h: float, *, tokens: int = 3) -> Batch:
    """One chosen and one rejected response whose log-ratio sums differ by h."""
    logp = -1 - f64(torch.rand(2, tokens))
    ref = logp.clone()
    ref[0, 0] -= h
    return Batch(
        logp=logp,
        ref_logp=ref,
        mask=torch.ones(2, tokens, dtype=torch.bool),
        rewards=f64([1.0, 0.0]),
        group=torch.tensor([5, 5]),
    )


def loss(batch: Batch, **options: object) -> float:
    return float(loss_and_gradients(method("dpo", **options), batch)[0])


@pytest.mark.checks("dpo", "h = 0: log 2 for any β")
@pytest.mark.parametrize("beta", [0.01, 0.1, 5.0])
def test_at_zero(beta: float) -> None:
    assert loss(pair(0.0), beta=beta) == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.checks("dpo", "gradient -βσ(-βh)/n on chosen, +βσ(-βh)/n on rejected, equal over t")
def test_gradient() -> None:
    batch = make_batch(1)
    found = policy_gradient(method("dpo", beta=0.3), batch)
    chosen, rejected = best_and_worst(batch)
    score = torch.where(batch.mask, batch.logp - batch.ref_logp, 0.0).sum(1)
    expected = torch.zeros_like(found)
    for c, j in zip(chosen, rejected):
        weight = 0.3 * torch.sigmoid(-0.3 * (score[c] - score[j])) / len(chosen)
        expected[c], expected[j] = -weight * batch.mask[c], weight * batch.mask[j]
    close(found, expected)


@pytest.mark.checks(
    "dpo", "a constant in both reference sums changes nothing; swapping maps h → -h"
)
def test_shift_and_swap() -> None:
    batch = pair(0.8)
    moved = batch.ref_logp.clone()
    moved[:, 0] += 2.0
    assert loss(batch.replace(ref_logp=moved)) == pytest.approx(loss(batch), rel=1e-12)
    swapped = batch.replace(rewards=f64([0.0, 1.0]))
    assert loss(swapped) == pytest.approx(loss(pair(-0.8)), rel=1e-12)


@pytest.mark.checks("dpo", "label smoothing 1/2: symmetric in h, least at h = 0")
def test_half_smoothing() -> None:
    half = {"label_smoothing": 0.5, "beta": 1.0}
    assert loss(pair(0.7), **half) == pytest.approx(loss(pair(-0.7), **half), rel=1e-12)
    assert loss(pair(0.7), **half) > loss(pair(0.0), **half)
    assert loss(pair(0.7), beta=1.0) != pytest.approx(loss(pair(-0.7), beta=1.0))


@pytest.mark.checks("dpo", "β → 0: log 2, gradient -β/2 on chosen tokens to first order")
def test_small_beta() -> None:
    batch = pair(1.3)
    assert loss(batch, beta=1e-6) == pytest.approx(math.log(2), rel=1e-5)
    close(policy_gradient(method("dpo", beta=1e-6), batch)[0], -0.5e-6, rtol=1e-5)


def test_sums_not_means() -> None:
    """The same log-ratio per token counts twice in a response of twice the length."""
    short, long = (pair(0.0, tokens=n) for n in (2, 4))
    for batch in (short, long):
        batch.ref_logp[0] = batch.logp[0] - 0.5
    assert loss(short, beta=1.0) == pytest.approx(math.log1p(math.exp(-1.0)))
    assert loss(long, beta=1.0) == pytest.approx(math.log1p(math.exp(-2.0)))


def test_ipo_means_or_sums() -> None:
    batch = pair(0.6)
    assert loss(batch, form="ipo") == pytest.approx((0.2 - 5.0) ** 2)
    assert loss(batch, form="ipo", ipo_mean=False) == pytest.approx((0.6 - 5.0) ** 2)


def test_robust_form() -> None:
    agree, oppose = (math.log1p(math.exp(-s * 0.1 * 0.6)) for s in (1, -1))
    expected = (0.8 * agree - 0.2 * oppose) / 0.6
    assert loss(pair(0.6), form="robust", label_smoothing=0.2) == pytest.approx(expected)
    with pytest.raises(ValueError, match="below"):
        method("dpo", form="robust", label_smoothing=0.5)


def test_pairs_are_best_and_worst_of_a_prompt() -> None:
    batch = make_batch(1).replace(rewards=f64([0.5, 1.0, 1.0, 0.3, 0.3, 0.3, math.nan, 0.1, 0.2]))
    chosen, rejected = best_and_worst(batch)
    assert chosen.tolist() == [1, 8]  # the first of equals; a prompt with equal rewards has no pair
    assert rejected.tolist() == [0, 7]


def test_no_pairs_is_no_loss() -> None:
    batch = make_batch(1)
    value, grads = loss_and_gradients(
        method("dpo"), batch.replace(rewards=torch.ones_like(batch.rewards))
    )
    assert value == 0
    assert grads["logp"].eq(0).all()
