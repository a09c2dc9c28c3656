import pytest
import torch
from helpers import advantages, close, crafted, f64, make_batch, method, on_policy, policy_gradient

from methods._case import Case
from methods.loops import Terms, exp, ratio, seq_mean_token_mean, sequence_ratio, z_scores
from proxpo import Batch


def sapo(b: Batch, r: Terms, tau_pos: float, tau_neg: float) -> torch.Tensor:
    a, x = z_scores(b), {}
    for k in r:
        tau = tau_pos if a[k] > 0 else tau_neg
        x[k] = -4 / tau / (1 + exp(-tau * (r[k] - 1))) * a[k]
    return seq_mean_token_mean(x, b)


CASES = {
    "sapo": Case("sapo", {}, lambda b: sapo(b, ratio(b), 1.0, 1.05)),
    "sapo-sequence": Case(
        "sapo",
        {"level": "sequence", "tau_pos": 2.0},
        lambda b: sapo(b, sequence_ratio(b), 2.0, 1.05),
    ),
}


def gate(r: torch.Tensor, sign: float, **options: float) -> torch.Tensor:
    """-dx/dlogp/(A·r): how far the gate is open."""
    batch = crafted([r.log().tolist()], [sign])
    return -policy_gradient(method("sapo", **options), batch)[0] * len(r) / sign / r


@pytest.mark.checks("sapo", "r = 1: -A/(B·L_i) for any τ")
@pytest.mark.parametrize("tau", [0.1, 1.0, 30.0])
def test_on_policy(tau: float) -> None:
    batch = on_policy(make_batch(1))
    made = method("sapo", tau_pos=tau, tau_neg=2 * tau)
    close(policy_gradient(made, batch), policy_gradient(method("grpo"), batch))


@pytest.mark.checks("sapo", "dloss/dlogp = -4p(1-p)·r·A/(B·L_i)")
def test_analytic_gradient() -> None:
    batch, made = make_batch(1, spread=0.6), method("sapo")
    a = advantages(made, batch)
    r = (batch.logp - batch.old_logp).exp()
    tau = torch.where(a > 0, 1.0, 1.05 * torch.ones_like(a))
    p = torch.sigmoid(tau * (r - 1))
    weight = 1 / (9 * batch.mask.double().sum(1, keepdim=True))
    close(policy_gradient(made, batch), -4 * p * (1 - p) * r * a * weight)
    swapped = torch.sigmoid(torch.where(a > 0, 1.05, 1.0) * (r - 1))
    wrong = -4 * swapped * (1 - swapped) * r * a * weight
    assert not torch.allclose(policy_gradient(made, batch), wrong)


@pytest.mark.checks("sapo", "the gate is sech²(τ(r-1)/2): even in r-1, falling, never 0")
def test_gate_shape() -> None:
    delta = torch.linspace(0.0, 0.95, 6).double()
    up, down = gate(1 + delta, 1.0), gate(1 - delta, 1.0)
    close(up, down)
    close(up, 1 / torch.cosh(delta / 2) ** 2)
    assert (up.diff() < 0).all()
    assert gate(f64([30.0]), 1.0) > 0


@pytest.mark.checks("sapo", "τ → 0: the gradient of unclipped -A·r")
def test_small_tau() -> None:
    batch = make_batch(1, spread=0.6)
    made = method("sapo", tau_pos=1e-5, tau_neg=1e-5)
    unclipped = method("grpo", trust="unclipped")
    close(policy_gradient(made, batch), policy_gradient(unclipped, batch), rtol=1e-9)


@pytest.mark.checks("sapo", "equal τ: flipping the signs of A flips the gradient")
def test_odd_in_the_advantage() -> None:
    batch = make_batch(1)
    batch = batch.replace(advantages=torch.linspace(-1, 1, 9).double())
    flipped = batch.replace(advantages=-batch.advantages)
    even, uneven = method("sapo", tau_neg=1.0), method("sapo")
    close(policy_gradient(even, flipped), -policy_gradient(even, batch))
    assert not torch.allclose(policy_gradient(uneven, flipped), -policy_gradient(uneven, batch))


def test_sequence_level_gates_the_row_ratio() -> None:
    batch = crafted([[0.4, 0.0]], [1.0])
    found = policy_gradient(method("sapo", level="sequence"), batch)
    s = f64(0.2).exp()
    close(found, (-s / torch.cosh((s - 1) / 2) ** 2 / 2).expand(1, 2))


@pytest.mark.parametrize("option", ["tau_pos", "tau_neg"])
def test_temperatures_must_be_positive(option: str) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        method("sapo", **{option: 0.0})
