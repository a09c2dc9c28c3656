import math
from typing import Any

import pytest
import torch
from helpers import (
    close,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    clipped,
    everywhere,
    gae,
    mean,
    number,
    plus,
    ratio,
    row,
    times,
    token_mean,
    token_rewards,
    value_terms,
    whitened,
)
from proxpo import Batch


def duration_weights(b: Batch, *, least: float = 0.0, most: float = math.inf) -> Numbers:
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    seconds = {i: max(number(b.duration[i]), least) for i in rows}
    usual = mean(list(seconds.values()))
    return everywhere({i: min(s / usual, most) if usual else 1.0 for i, s in seconds.items()}, b)


def duration_aware(b: Batch, w: Numbers, *, gamma: float = 1.0, whiten: bool = True) -> Any:
    raw = gae(token_rewards(b), b, gamma=gamma, lam=1.0)
    x = times(clipped(ratio(b), whitened(raw) if whiten else raw, 0.2, 0.2), w)
    return token_mean(plus(x, (1.0, value_terms(b, raw, clip=0.5))), b)


CASES = {
    "duration-aware": Case("duration-aware", {}, lambda b: duration_aware(b, duration_weights(b))),
    "duration-aware-bounded": Case(
        "duration-aware",
        {"max_weight": 1.2, "min_duration": 2.0, "gamma": 0.9, "whitening": False},
        lambda b: duration_aware(
            b, duration_weights(b, least=2.0, most=1.2), gamma=0.9, whiten=False
        ),
    ),
}


def weights_of(batch: Batch, **options: object) -> torch.Tensor:
    """w of each response, read off the gradient that plain PPO has without it."""
    made = method("duration-aware", value_clip=None, **options)
    weighed = policy_gradient(made, batch)
    plain = policy_gradient(method("ppo", value_clip=None), batch)
    live = plain.abs() > 1e-9
    assert live.any(dim=1).all()
    rows = [(w[m] / p[m]) for w, p, m in zip(weighed, plain, live)]
    for share in rows:
        close(share, share[0].expand_as(share))
    return torch.stack([share[0] for share in rows])


@pytest.fixture
def batch() -> Batch:
    return make_batch(1, spread=0.02)  # inside the clip: every token has a gradient


@pytest.mark.checks("duration-aware", "equal durations: loss and gradient of the base method")
def test_equal_durations(batch: Batch) -> None:
    even = batch.replace(duration=torch.full_like(batch.duration, 7.0))
    value, grads = loss_and_gradients(method("duration-aware"), even)
    expected, expected_grads = loss_and_gradients(method("ppo"), even)
    close(value, expected)
    close(grads, expected_grads)


@pytest.mark.checks("duration-aware", "dloss/dlogp is Δt/mean(Δt) times the base's, mean weight 1")
def test_weights(batch: Batch) -> None:
    w = weights_of(batch)
    close(w, batch.duration / batch.duration.mean())
    close(w.mean(), 1.0)


@pytest.mark.checks("duration-aware", "the clipping mask is that of the base method")
def test_clipping_mask() -> None:
    far = make_batch(3, spread=0.6)
    weighed, plain = (policy_gradient(method(m), far) for m in ("duration-aware", "ppo"))
    assert (plain[far.mask] == 0).any()
    assert torch.equal(weighed == 0, plain == 0)


@pytest.mark.checks("duration-aware", "scaling all durations changes nothing")
def test_scale(batch: Batch) -> None:
    scaled = batch.replace(duration=60 * batch.duration)
    value, grads = loss_and_gradients(method("duration-aware"), batch)
    found = loss_and_gradients(method("duration-aware"), scaled)
    close(found[0], value)
    close(found[1], grads)


@pytest.mark.checks(
    "duration-aware", "doubling one duration moves all weights, not the others' order"
)
def test_one_longer(batch: Batch) -> None:
    longer = batch.duration.clone()
    longer[2] *= 2
    before, after = weights_of(batch), weights_of(batch.replace(duration=longer))
    assert (before != after).all()
    others = torch.tensor([i for i in range(len(before)) if i != 2])
    assert torch.equal(before[others].argsort(), after[others].argsort())


@pytest.mark.checks("duration-aware", "counts ∝ π/Δt: weighed gradients are ∝ π, plain ones ∝ π/Δt")
def test_bandit() -> None:
    """Two actions, π = 1/2 each, Δt = 1 and 10: in 20 units of time 10 samples against 1."""
    seconds = f64([1.0] * 10 + [10.0])
    rows = len(seconds)
    batch = Batch(
        logp=torch.full((rows, 1), math.log(0.5)).double(),
        old_logp=torch.full((rows, 1), math.log(0.5)).double(),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        advantages=torch.ones(rows).double(),
        duration=seconds,
    )
    made = method("duration-aware").replace(value=None)
    weighed = policy_gradient(made, batch)[:, 0]
    close(weighed[:10].sum(), weighed[10])
    plain = policy_gradient(made.replace(weights=()), batch)[:, 0]
    close(plain[:10].sum(), 10 * plain[10])


def test_bounds(batch: Batch) -> None:
    held = weights_of(batch, max_weight=1.1)
    w = batch.duration / batch.duration.mean()
    assert (w > 1.1).any()
    close(held, w.clamp(max=1.1))
    raised = batch.duration.clamp(min=2.5)
    close(weights_of(batch, min_duration=2.5), raised / raised.mean())


def test_instant_actions_weigh_one(batch: Batch) -> None:
    close(weights_of(batch.replace(duration=0 * batch.duration)), torch.ones(9).double())


def test_what_is_missing_is_said(batch: Batch) -> None:
    with pytest.raises(proxpo.ProxpoError, match=r"by_duration needs .*'duration'.*environment"):
        proxpo.loss_fn(method("duration-aware"))(batch.replace(duration=None))
    for wrong in (math.nan, -1.0):
        seconds = batch.duration.clone()
        seconds[4] = wrong
        with pytest.raises(proxpo.ProxpoError, match="response 4 has the duration"):
            proxpo.loss_fn(method("duration-aware"))(batch.replace(duration=seconds))
