import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    advantages,
    close,
    crafted,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    on_policy,
    policy_gradient,
)

from methods._case import Case
from methods.loops import exp, k3, larger, log_ratio, mean, row, smaller, z_scores
from proxpo import Batch


def gmpo(
    b: Batch, clip: Callable[[Any, float], Any], *, per: str, kl_coef: float = 0.0
) -> torch.Tensor:
    d, a, kl, terms = log_ratio(b), z_scores(b), k3(b, b.ref_logp), []
    for i in range(len(b.mask)):
        ts = row(b, i)
        if not ts:
            continue
        parts = [clip(d[i, t], a[i, t]) if per == "token" else d[i, t] for t in ts]
        total = clip(sum(parts), a[i, ts[0]]) if per == "sequence" else sum(parts)
        g = exp(total if per == "product" else total / len(ts))
        terms.append(-a[i, ts[0]] * g + kl_coef * mean([kl[i, t] for t in ts]))
    return mean(terms)


def one_sided(low: float, high: float) -> Callable[[Any, float], Any]:
    return lambda d, a: smaller(d, high) if a >= 0 else larger(d, -low)


CASES = {
    "gmpo": Case(
        "gmpo",
        {"clip_low": 0.2, "clip_high": 0.1},
        lambda b: gmpo(b, one_sided(0.2, 0.1), per="token"),
    ),
    "gmpo-sequence": Case(
        "gmpo",
        {"clip_per": "sequence", "kl_coef": 0.1, "clip_high": 0.3},
        lambda b: gmpo(b, one_sided(0.4, 0.3), per="sequence", kl_coef=0.1),
    ),
    "gmpo-product": Case(
        "gmpo",
        {"clip_per": "none", "normalise": False},
        lambda b: gmpo(b, one_sided(0.4, 0.4), per="product"),
    ),
}


FREE = {"clip_per": "none"}


@pytest.mark.checks("gmpo", "no token clipped: GSPO without a clip, in loss and gradient")
def test_reduces_to_gspo() -> None:
    batch = make_batch(1, spread=0.1)
    gspo = loss_and_gradients(method("gspo", trust="unclipped"), batch)
    for found in (method("gmpo", **FREE), method("gmpo", clip_low=9.0, clip_high=9.0)):
        value, grads = loss_and_gradients(found, batch)
        close(value, gspo[0])
        close(grads, gspo[1])


@pytest.mark.checks("gmpo", "row by row |loss| is at most that of the arithmetic mean")
def test_geometric_below_arithmetic() -> None:
    batch = make_batch(1, spread=0.6)
    for i in range(len(batch.mask)):
        one = batch.rows(torch.tensor([i])).replace(advantages=torch.ones(1).double())
        geometric = loss_and_gradients(method("gmpo", **FREE), one)[0]
        arithmetic = loss_and_gradients(method("grpo", trust="unclipped"), one)[0]
        assert abs(geometric) <= abs(arithmetic) + 1e-15


@pytest.mark.checks("gmpo", "a clipped token alone is silent; the others keep -A·g/(B·L)")
def test_clipped_token_still_counts() -> None:
    batch = crafted([[0.9, 0.1, -0.2]], [2.0])
    g = math.exp((0.4 + 0.1 - 0.2) / 3)
    value, grads = loss_and_gradients(method("gmpo"), batch)
    close(value, -2 * g)
    close(grads["logp"], f64([[0.0, 1.0, 1.0]]) * -2 * g / 3)


@pytest.mark.checks("gmpo", "r = 1: -A/(B·L_i)")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1))
    close(policy_gradient(method("gmpo"), batch), policy_gradient(method("grpo"), batch))


@pytest.mark.checks("gmpo", "A > 0 ignores the lower bound, A < 0 the upper one")
def test_one_sided() -> None:
    batch = crafted([[-0.9, 0.9], [-0.9, 0.9]], [1.0, -1.0])
    assert policy_gradient(method("gmpo"), batch).ne(0).tolist() == [[True, False], [False, True]]


def test_bounds_are_in_log_space() -> None:
    """Bounds 1±0.4 on the ratio, the wrong variant, would clip r = 1.45; e^0.4 is 1.49."""
    batch = crafted([[math.log(1.45)]], [1.0])
    close(policy_gradient(method("gmpo"), batch), -1.45)
    linear = method("grpo", clip_high=0.4)
    assert policy_gradient(linear, batch) == 0


def test_ablations() -> None:
    batch = crafted([[0.5, 0.5, -0.1]], [1.0])
    whole = loss_and_gradients(method("gmpo", clip_per="sequence"), batch)
    close(whole[0], -math.exp(0.4 / 3))
    assert whole[1]["logp"].eq(0).all()
    product = loss_and_gradients(method("gmpo", normalise=False, **FREE), batch)[0]
    close(product, -math.exp(0.9))


def test_zero_advantage_is_zero_loss() -> None:
    batch = make_batch(1).replace(advantages=torch.zeros(9).double())
    value, grads = loss_and_gradients(method("gmpo"), batch)
    assert value == 0
    assert grads["logp"].eq(0).all()
    assert advantages(method("gmpo"), batch).eq(0).all()
