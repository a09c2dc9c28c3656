import math
from typing import Any

import pytest
import torch
from helpers import close, crafted, f64, make_batch, method, on_policy, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    k3,
    larger,
    number,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    smaller,
    token_mean,
    z_scores,
)
from proxpo import Batch
from proxpo.ops.masked import row_quantile


def certain(b: Batch) -> set[Any]:
    """Tokens at or below the 80 % quantile of their response's entropies."""
    found = set()
    for i in range(len(b.mask)):
        ts = row(b, i)
        h = sorted(number(b.entropy[i, t]) for t in ts)
        place = 0.8 * (len(h) - 1)
        for t in ts:
            low = math.floor(place)
            high = min(low + 1, len(h) - 1)
            if number(b.entropy[i, t]) <= h[low] + (place - low) * (h[high] - h[low]):
                found.add((i, t))
    return found


def aspo_terms(b: Batch, *, eps: float = 0.2, c_pos: float = 3.0, c_neg: float = 3.0) -> Terms:
    a, r, low, x = z_scores(b), ratio(b), certain(b), {}
    for k in r:
        e = eps if k in low else 0.4
        if a[k] >= 0:
            held = smaller(r[k], 1 + e)
            soft = 1 / number(held) > c_pos
            x[k] = -a[k] * (c_pos * b.logp[k] if soft else held / number(held) ** 2)
        else:
            held = larger(r[k], 1 - e)
            x[k] = -a[k] * (c_neg * b.logp[k] if number(held) > c_neg else held)
    return x


CASES = {
    "aspo": Case(
        "aspo", {}, lambda b: token_mean(plus(aspo_terms(b), (0.001, k3(b, b.ref_logp))), b)
    ),
    "aspo-capped": Case(
        "aspo",
        {
            "cap_pos": 1.1,
            "cap_neg": 1.2,
            "clip_low": 0.1,
            "clip_high": 0.1,
            "kl_coef": 0.0,
            "average": "sequence",
        },
        lambda b: seq_mean_token_mean(aspo_terms(b, eps=0.1, c_pos=1.1, c_neg=1.2), b),
    ),
}


SLUG = "aspo"
PLAIN = {"kl_coef": 0.0}


def weight(r: list[float], sign: float, **options: float) -> torch.Tensor:
    """-dx/dlogp/A for tokens of these ratios, all of one entropy."""
    batch = crafted([f64(r).log().tolist()], [sign])
    batch = batch.replace(entropy=torch.ones_like(batch.logp))
    return -policy_gradient(method(SLUG, **PLAIN, **options), batch)[0] * len(r) / sign


@pytest.mark.checks(SLUG, "on-policy w = 1: GRPO's gradient")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1))
    plain = method("grpo", aggregate="token_mean")
    close(policy_gradient(method(SLUG, **PLAIN), batch), policy_gradient(plain, batch))


@pytest.mark.checks(SLUG, "A < 0 inside [1-ε, 3]: GRPO's gradient; A > 0: GRPO's times 1/r²")
def test_against_grpo() -> None:
    r = f64([0.85, 1.0, 1.15])
    close(weight(r.tolist(), -1.0), r)
    close(weight(r.tolist(), 1.0), r / r**2)


@pytest.mark.checks(SLUG, "w⁺ falls in r, w⁻ rises; both at most 3 and continuous at the cap")
def test_shape_of_the_weights() -> None:
    r = torch.linspace(0.05, 1.19, 60).double()
    up = weight(r.tolist(), 1.0)
    assert (up.diff() <= 0).all()
    close(up, (1 / r).clamp(max=3))
    r = torch.linspace(0.81, 9.0, 60).double()
    down = weight(r.tolist(), -1.0)
    assert (down.diff() >= 0).all()
    close(down, r.clamp(max=3))
    for sign, edge in ((1.0, 1 / 3), (-1.0, 3.0)):
        left, right = weight([edge * (1 - 1e-9), edge * (1 + 1e-9)], sign)
        close(left, right, rtol=1e-8)


@pytest.mark.checks(SLUG, "no gradient beyond 1+ε (A ≥ 0) and below 1-ε (A < 0): it jumps there")
def test_hard_side() -> None:
    close(weight([1.199, 1.201, 50.0], 1.0), [1 / 1.199, 0.0, 0.0])
    close(weight([0.801, 0.799, 0.01], -1.0), [0.801, 0.0, 0.0])


def test_values() -> None:
    """-A/r inside, -A/(1+ε) where clipped, -A·c·log π beyond the cap."""
    z = [math.log(0.5), math.log(2.0), math.log(0.1)]
    for index, value in enumerate([-2.0, -1 / 1.2, None]):
        batch = crafted([[z[index]]], [1.0])
        batch = batch.replace(entropy=torch.ones_like(batch.logp))
        found = proxpo.loss_fn(method(SLUG, **PLAIN))(batch).value
        close(found, -3.0 * float(batch.logp) if value is None else value)


@pytest.mark.checks(SLUG, "tokens above the response's 80 % entropy quantile have ε = 0.4")
def test_uncertain_tokens_have_more_room() -> None:
    batch = crafted([[math.log(1.3)] * 5], [1.0])
    batch = batch.replace(entropy=f64([[0.1, 0.9, 0.2, 0.3, 0.4]]))
    found = policy_gradient(method(SLUG, **PLAIN), batch)
    assert found[0].ne(0).tolist() == [False, True, False, False, False]
    below = batch.replace(logp=batch.old_logp + math.log(0.7), advantages=f64([-1.0]))
    assert policy_gradient(method(SLUG, **PLAIN), below)[0].ne(0).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.checks(SLUG, "equal entropies, or one token: ε = 0.2 everywhere")
def test_equal_entropies() -> None:
    batch = crafted([[math.log(1.3)] * 3, [math.log(1.3), 0.0, 0.0]], [1.0, 1.0])
    batch = batch.replace(
        entropy=f64([[0.5] * 3, [0.9, 0.0, 0.0]]),
        mask=torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(),
    )
    assert policy_gradient(method(SLUG, **PLAIN), batch).eq(0).all()


def test_row_quantile_is_torchs() -> None:
    batch = make_batch(3)
    for q in (0.0, 0.3, 0.8, 1.0):
        found = row_quantile(batch.entropy, batch.mask, q)
        for i, keep in enumerate(batch.mask):
            close(found[i], torch.quantile(batch.entropy[i][keep], q))
    empty = row_quantile(batch.entropy, torch.zeros_like(batch.mask), 0.8)
    assert empty.eq(0).all()


def test_entropy_gets_no_gradient() -> None:
    batch = make_batch(1)
    leaf = batch.entropy.clone().requires_grad_()
    value = proxpo.loss_fn(method(SLUG, **PLAIN))(batch.replace(entropy=leaf)).value
    assert not value.requires_grad


def test_zero_advantage_has_no_loss() -> None:
    batch = crafted([[5.0, -5.0]], [0.0]).replace(entropy=f64([[0.1, 0.2]]))
    close(policy_gradient(method(SLUG, **PLAIN), batch), [[0.0, 0.0]])


def test_kl_to_the_reference_is_on_by_default() -> None:
    assert method(SLUG).regularisers[0].options["coef"] == 0.001
    assert method(SLUG).regularisers[0].options["estimator"] == "k3"


@pytest.mark.parametrize("option", [{"clip_low": -0.1}, {"quantile": 1.5}, {"cap_pos": 0.5}])
def test_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="asymmetric_clip"):
        method(SLUG, **option)
