import math
from dataclasses import replace

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
    pad_columns,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import (
    entropies,
    k3,
    number,
    plus,
    ratio,
    sample_size,
    token_mean,
    weighted_score,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.trust import ess


def p3o(b: Batch, *, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> torch.Tensor:
    r, a = ratio(b), z_scores(b, eps=1e-8)
    e = sample_size(r)
    x = weighted_score({k: min(number(v), e) for k, v in r.items()}, a, b)
    kl = k3(b, b.old_logp)
    x = plus(x, (1 - e, kl), (kl_coef, k3(b, b.ref_logp)), (-entropy_coef, entropies(b)))
    return token_mean(x, b)


CASES = {
    "p3o": Case("p3o", {}, p3o),
    "p3o-terms": Case(
        "p3o",
        {"kl_coef": 0.1, "entropy_coef": 0.01},
        lambda b: p3o(b, kl_coef=0.1, entropy_coef=0.01),
    ),
}


def size(batch: object) -> torch.Tensor:
    r = (batch.logp - batch.old_logp).exp()
    return ess(r, batch.mask)


@pytest.mark.checks("p3o", "all ratios equal c: ESS = 1, no pull, weight min(c, 1)")
@pytest.mark.parametrize("c", [0.3, 1.0, 4.0])
def test_constant_ratio(c: float) -> None:
    batch = crafted(torch.full((2, 4), math.log(c)), [1.0, -2.0])
    close(size(batch), 1.0, rtol=1e-7)
    expected = -min(c, 1.0) * batch.advantages[:, None].expand(2, 4) / 8
    close(policy_gradient(method("p3o"), batch), expected, rtol=1e-6)


@pytest.mark.checks("p3o", "logp = old: REINFORCE with group z-scores, -A/n per token")
def test_on_policy() -> None:
    batch, made = on_policy(make_batch(1)), method("p3o")
    found = policy_gradient(made, batch)
    close(found, -advantages(made, batch) / batch.mask.double().sum(), rtol=1e-8)


@pytest.mark.checks("p3o", "ESS ignores r → c·r and masked tokens; 1/n ≤ ESS ≤ 1")
def test_properties_of_ess() -> None:
    for spread in (0.1, 1.0, 5.0):
        batch = make_batch(1, spread=spread)
        n = float(batch.mask.sum())
        value = size(batch)
        assert 1 / n <= value <= 1
        close(size(batch.replace(old_logp=batch.old_logp - 3.0)), value, rtol=1e-7)
        close(size(pad_columns(batch, 3, garbage=50.0)), value)
    one_huge = crafted([[40.0, 0.0, 0.0, 0.0]], [1.0])
    close(size(one_huge), 0.25)


@pytest.mark.checks("p3o", "the cap silences no token: r ≫ 1 with A > 0 keeps the weight ESS > 0")
def test_no_token_is_silenced() -> None:
    batch = crafted([[3.0, 0.0, 0.0]], [1.0])
    e = size(batch)
    r = (batch.logp - batch.old_logp).exp()
    pull = (1 - e) * (1 - 1 / r)
    close(policy_gradient(method("p3o"), batch), (-r.clamp(max=float(e)) + pull) / 3)
    assert policy_gradient(method("grpo"), batch)[0, 0] == 0
    assert 0 < e < 1


@pytest.mark.checks("p3o", "A = 0: gradient (1-ESS)(1-1/r)/n, towards r = 1 from both sides")
def test_pull_alone() -> None:
    batch = crafted([[1.0, -1.0, 0.0]], [0.0])
    found = policy_gradient(method("p3o"), batch)
    r = (batch.logp - batch.old_logp).exp()
    close(found, (1 - size(batch)) * (1 - 1 / r) / 3)
    assert found[0].sign().tolist() == [1.0, -1.0, 0.0]


@pytest.mark.checks("p3o", "the cap is ESS, not 1/ESS: one r ≫ 1 has a weight below 1")
def test_cap_is_not_its_inverse() -> None:
    batch = crafted([[3.0, 0.0, 0.1, -0.1]], [1.0])
    e, r = size(batch), (batch.logp - batch.old_logp).exp()
    pull = (1 - e) * (1 - 1 / r)

    def weight(cap: torch.Tensor) -> torch.Tensor:
        gradient = (-torch.minimum(r, cap) + pull) / 4
        return (pull / 4 - gradient) * 4

    found = (pull - 4 * policy_gradient(method("p3o"), batch))[0, 0]
    assert found < 1
    close(found, weight(e)[0, 0])
    assert weight(1 / e)[0, 0] > 1  # the inverse would fail the line above


def test_zero_variance_groups_still_count() -> None:
    batch = make_batch(1).replace(rewards=torch.ones(9).double())
    e = size(batch)
    found = policy_gradient(method("p3o"), batch)
    r = (batch.logp - batch.old_logp).exp()
    close(found, torch.where(batch.mask, (1 - e) * (1 - 1 / r), 0.0) / batch.mask.double().sum())


def test_kl_gradient_beyond_the_clamp() -> None:
    """The exponent is held at 10: far below the old policy the pull's slope is 1, not -e^30."""
    batch = crafted([[-30.0, 0.0]], [0.0])
    close(policy_gradient(method("p3o"), batch)[0, 0], (1 - size(batch)) / 2)


def test_scope_of_the_statistic() -> None:
    """Per micro-batch the ESS of the parts is used, over the batch that of the whole."""
    batch = make_batch(1, spread=0.6)
    for scope, same in (("batch", True), ("microbatch", False)):
        made = method("p3o", ess_scope=scope)
        ready = proxpo.prepare(made, batch)
        parts = [ready.batch.rows(slice(0, 4)), ready.batch.rows(slice(4, 9))]

        def loss(part: object, all_sum: object, made: object = made, ready: object = ready):
            return proxpo.policy_loss(made, part, replace(ready.ctx, all_sum=all_sum)).value

        total = proxpo.over_microbatches(loss, parts)
        value = sum(loss(part, all_sum=total) for part in parts)
        whole = proxpo.loss_fn(made)(batch).value
        assert torch.allclose(value, whole, rtol=1e-12) == same


def test_optional_terms() -> None:
    batch = make_batch(1)
    base = loss_and_gradients(method("p3o"), batch)
    more = loss_and_gradients(method("p3o", kl_coef=0.2, entropy_coef=0.3), batch)
    n = batch.mask.double().sum()
    close(more[1]["entropy"], -0.3 * batch.mask.double() / n)
    kl = 0.2 * (1 - (batch.ref_logp - batch.logp).exp()) * batch.mask / n
    close(more[1]["logp"] - base[1]["logp"], kl)
    close(f64(base[1]["entropy"]), 0.0 * batch.logp)
