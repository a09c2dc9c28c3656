import math
from typing import Any

import pytest
import torch
from helpers import (
    close,
    crafted,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    policy_gradient,
    with_leaves,
)

import proxpo
from methods._case import Case
from methods.loops import (
    clipped,
    kept,
    mean,
    number,
    ratio,
    row,
    times,
    token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.ratio import proximal_logp


def proximal(b: Batch, kind: str) -> Any:
    out = b.prox_logp.clone()
    for i, t in tokens(b):
        d, pb, p = int(b.lag[i, t]), number(b.old_logp[i, t]), number(b.logp[i, t])
        if kind == "linear":
            share = (d - 1) / d if d else 0.0
            out[i, t] = math.log((1 - share) * math.exp(pb) + share * math.exp(p) + 1e-10)
        elif kind != "recompute":
            alpha = 1 / d if d else (0.0 if kind == "a3po" else 1.0)
            out[i, t] = alpha * pb + (1 - alpha) * p
    return out


def decoupled(
    b: Batch, kind: str = "recompute", *, cap: float = math.inf, dual: float = math.inf
) -> torch.Tensor:
    prox = proximal(b, kind)
    v = {(i, t): math.exp(number(prox[i, t]) - number(b.old_logp[i, t])) for i, t in tokens(b)}
    v = {k: min(x, cap) for k, x in v.items()}
    return token_mean(times(clipped(ratio(b, prox), z_scores(b), 0.2, 0.2, dual=dual), v), b)


def decoupled_masked(b: Batch) -> torch.Tensor:
    a, v = z_scores(b), {}
    b = kept(b, lambda i, t: max(int(b.lag[i, s]) for s in row(b, i)) <= 3)
    for i, t in tokens(b):
        g = mean([number(b.prox_logp[i, s]) - number(b.old_logp[i, s]) for s in row(b, i)])
        v[i, t] = math.exp(g) if math.exp(g) <= 1.02 else 0.0
    return token_mean(times(clipped(ratio(b, b.prox_logp), a, 0.2, 0.2), v), b)


CASES = {
    "decoupled-ppo": Case("decoupled-ppo", {}, decoupled),
    "decoupled-masked": Case(
        "decoupled-ppo",
        {"weight_cap": 1.02, "weight_mode": "mask", "weight_level": "geometric", "max_lag": 3},
        decoupled_masked,
    ),
    "a3po": Case(
        "decoupled-ppo",
        {"prox": "a3po", "weight_cap": 1.2},
        lambda b: decoupled(b, "a3po", cap=1.2),
    ),
    "a3po-areal": Case("decoupled-ppo", {"prox": "areal"}, lambda b: decoupled(b, "areal")),
    "a3po-linear": Case(
        "decoupled-ppo", {"prox": "linear", "dual": 1.5}, lambda b: decoupled(b, "linear", dual=1.5)
    ),
}


SLUG = "decoupled-ppo"
UNCLIPPED = {"trust": "unclipped"}


@pytest.mark.checks(SLUG, "prox = behaviour: v = 1, ordinary PPO")
def test_prox_is_behaviour() -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method(SLUG), batch.replace(prox_logp=batch.old_logp))
    expected = loss_and_gradients(method("grpo", aggregate="token_mean"), batch)
    close(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.checks(SLUG, "prox = current: u = 1, nothing clipped, weight π/π_b")
def test_prox_is_current() -> None:
    batch = make_batch(1, spread=0.8)
    batch = batch.replace(prox_logp=batch.logp)
    expected = method("reinforce", form="truncated", cap=math.inf, advantage="group_relative",
                      aggregate="token_mean")  # fmt: skip
    same = batch.replace(rollout_logp=batch.old_logp)
    close(policy_gradient(method(SLUG), batch), policy_gradient(expected, same))


@pytest.mark.checks(SLUG, "u·v = π/π_b: unclipped, the gradient does not know the proximal policy")
@pytest.mark.parametrize("prox", ["recompute", "a3po", "areal", "linear"])
def test_product_of_the_factors(prox: str) -> None:
    batch = make_batch(1)
    expected = policy_gradient(method("grpo", aggregate="token_mean", **UNCLIPPED), batch)
    close(policy_gradient(method(SLUG, prox=prox, **UNCLIPPED), batch), expected, rtol=1e-9)


def prox_at(lag: float, prox: str = "a3po") -> torch.Tensor:
    batch = crafted([[0.6, -0.3]], [1.0], lag=torch.full((1, 2), lag))
    return proximal_logp(batch, prox=prox), batch


@pytest.mark.checks(SLUG, "A-3PO: π_p lies between π_b and π; d = 1 → π_b, d → ∞ → π")
def test_interpolation() -> None:
    for lag in (0, 1, 2, 7):
        for prox in ("a3po", "areal", "linear"):
            p, batch = prox_at(lag, prox)
            low = torch.minimum(batch.old_logp, batch.logp)
            high = torch.maximum(batch.old_logp, batch.logp)
            assert (p >= low - 1e-9).all()
            assert (p <= high + 1e-9).all()
    p, batch = prox_at(1)
    close(p, batch.old_logp)
    p, batch = prox_at(10**9)
    close(p, batch.logp, rtol=1e-8)


@pytest.mark.checks(SLUG, "α = 1/4 brings a log-ratio of 0.6 inside ε = 0.2 (u = e^0.15)")
def test_interpolation_widens_the_clip() -> None:
    fresh = crafted([[0.6]], [1.0], lag=torch.tensor([[1]]))
    stale = fresh.replace(lag=torch.tensor([[4]]))
    assert policy_gradient(method(SLUG, prox="a3po"), fresh) == 0
    u, v = math.exp(0.15), math.exp(0.45)
    close(policy_gradient(method(SLUG, prox="a3po"), stale), -u * v)


@pytest.mark.checks(SLUG, "no gradient through v or through the proximal policy")
@pytest.mark.parametrize("prox", ["a3po", "linear"])
def test_prox_is_detached(prox: str) -> None:
    batch = with_leaves(make_batch(1))
    assert not proximal_logp(batch, prox=prox).requires_grad
    attached = batch.logp / 2 + batch.old_logp / 2  # π_p with gradient, the wrong variant
    wrong = torch.autograd.grad((batch.logp - attached).exp().sum(), batch.logp)[0]
    ours = batch.replace(lag=torch.full_like(batch.lag, 2))
    right = torch.autograd.grad(
        (batch.logp - proximal_logp(ours, prox="a3po")).exp().sum(), batch.logp
    )[0]
    close(right, 2 * wrong)


def test_caps_on_the_behaviour_weight() -> None:
    batch = crafted([[0.0, 0.0]], [1.0])
    batch = batch.replace(prox_logp=batch.old_logp + f64([[0.1, 2.0]]))
    batch = batch.replace(logp=batch.prox_logp.clone())
    v = math.exp(0.1)
    clamped = policy_gradient(method(SLUG, weight_cap=5.0), batch)
    close(clamped, -f64([[v, 5.0]]) / 2)
    masked = policy_gradient(method(SLUG, weight_cap=5.0, weight_mode="mask"), batch)
    close(masked, -f64([[v, 0.0]]) / 2)  # the count stays 2
    row = policy_gradient(method(SLUG, weight_level="geometric"), batch)
    close(row, -f64([[math.exp(1.05)] * 2]) / 2)


def test_weight_can_be_left_out() -> None:
    batch = make_batch(1)
    found = policy_gradient(method(SLUG, weight=False), batch)
    plain = method("grpo", aggregate="token_mean")
    close(found, policy_gradient(plain, batch.replace(old_logp=batch.prox_logp)))


def test_stale_responses_are_dropped() -> None:
    batch = make_batch(1)
    made = method(SLUG, max_lag=3)
    kept = proxpo.prepare(made, batch).batch.mask
    fresh = torch.where(batch.mask, batch.lag, 0).amax(1) <= 3
    assert torch.equal(kept, batch.mask & fresh[:, None])
    assert 0 < fresh.sum() < 9


def test_lag_zero_differs_between_article_and_code() -> None:
    p, batch = prox_at(0, "a3po")
    close(p, batch.logp)
    p, batch = prox_at(0, "areal")
    close(p, batch.old_logp)
    for lag in (1, 2, 5):
        close(prox_at(lag, "a3po")[0], prox_at(lag, "areal")[0])
