"""Estimators of a KL divergence from the sampled token."""

import math

import pytest
import torch
from helpers import close, f64, make_batch, method, policy_gradient
from torch import Tensor

from proxpo.ops.kl import kl_estimate, kl_exact

NAMES = ("k1", "abs", "k2", "k3", "k1+", "k2+", "k3+")
D = torch.linspace(-2.0, 2.0, 9).double()


def estimate(d: Tensor, name: str, **options: str) -> tuple[Tensor, Tensor]:
    """Value and derivative at log π - log π_ref = d."""
    logp = (-1.0 + d).requires_grad_()
    value = kl_estimate(logp, torch.full_like(d, -1.0), estimator=name, **options)
    return value.detach(), torch.autograd.grad(value.sum(), logp)[0]


@pytest.mark.checks("kl-estimators", "logp = ref: all values 0, all gradients 0 except k1's")
@pytest.mark.parametrize("name", NAMES)
def test_at_the_reference(name: str) -> None:
    value, slope = estimate(torch.zeros(3).double(), name)
    close(value, torch.zeros(3))
    close(slope, torch.full((3,), 1.0 if name == "k1" else 0.0))


@pytest.mark.checks("kl-estimators", "k3 ≥ 0, and k3 - k2 = -d³/6 + O(d⁴)")
def test_k3_near_zero() -> None:
    assert (estimate(D, "k3")[0] >= 0).all()
    d = f64([1e-2, -1e-2, 1e-3])
    close(estimate(d, "k3")[0] - estimate(d, "k2")[0], -(d**3) / 6, rtol=1e-2)


@pytest.mark.checks("kl-estimators", "values and gradients as tabulated; k3+ has k2's gradient")
def test_table() -> None:
    table = {
        "k1": (D, torch.ones_like(D)),
        "abs": (D.abs(), D.sign()),
        "k2": (D**2 / 2, D),
        "k3": ((-D).exp() - 1 + D, 1 - (-D).exp()),
        "k1+": (D, D),
        "k2+": (D**2 / 2, D),
        "k3+": ((-D).exp() - 1 + D, D),
    }
    for name, (value, slope) in table.items():
        found = estimate(D, name)
        close(found[0], value)
        close(found[1], slope)
    for alias, name in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")):
        close(estimate(D, alias)[0], table[name][0])


@pytest.mark.checks("kl-estimators", "r·k3 has the gradient r·d; plain k3 has not")
def test_ratio_correction() -> None:
    batch = make_batch(1)
    r, d = (batch.logp - batch.old_logp).exp(), batch.logp - batch.ref_logp
    weight = batch.mask / (9 * batch.mask.double().sum(1, keepdim=True))
    base = policy_gradient(method("grpo"), batch)
    corrected = policy_gradient(method("grpo", kl_coef=1.0, kl_ratio_corrected=True), batch) - base
    close(corrected, r * d * weight)
    plain = policy_gradient(method("grpo", kl_coef=1.0), batch) - base
    assert not torch.allclose(plain, corrected)


@pytest.mark.checks("kl-estimators", "E[k1] = E[k3] = KL and E[∇k2] = ∇KL over five tokens")
def test_expectations() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=g).double().requires_grad_()
    ref = torch.randn(5, generator=g).double().log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    exact = (logp.exp() * (logp - ref)).sum()
    for name in ("k1", "k3"):
        close((p * kl_estimate(logp, ref, estimator=name)).sum().detach(), exact.detach())

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = gradient(exact)
    close(gradient((p * kl_estimate(logp, ref, estimator="k2")).sum()), expected)
    close(gradient((p * kl_estimate(logp, ref, estimator="k3+")).sum()), expected)
    nothing = gradient((p * kl_estimate(logp, ref, estimator="k1")).sum())
    close(nothing, torch.zeros(5))  # as a loss k1 regularises nothing
    k3 = gradient((p * kl_estimate(logp, ref, estimator="k3")).sum())
    forward = gradient((ref.exp() * (ref - logp)).sum())
    close(k3, forward)  # k3 as a loss descends KL(ref‖π), the other direction


@pytest.mark.checks("kl-estimators", "ref - logp = 3: 16.09 without a clamp, 10 with zero slope")
def test_clamps() -> None:
    far = f64([-3.0])
    raw = math.exp(3) - 4
    value, slope = estimate(far, "k3")
    close(value, [raw])
    close(slope, [1 - math.exp(3)])
    for clamp in ("verl", "openrlhf"):
        value, slope = estimate(far, "k3", clamp=clamp)
        close(value, [10.0])
        close(slope, [0.0])
    value, slope = estimate(f64([40.0, -40.0]), "k1", clamp="openrlhf")
    close(value, [10.0, -10.0])
    close(slope, [0.0, 0.0])
    close(estimate(f64([40.0]), "k1", clamp="verl")[0], [40.0])
    value, slope = estimate(f64([-45.0]), "k3", clamp="dr-grpo")
    close(value, [math.expm1(40.0) - 45.0])
    close(slope, [1.0])
    value, slope = estimate(f64([-12.0]), "k3", clamp="p3o")
    close(value, [math.expm1(10.0) - 12.0])
    close(slope, [1.0])


def test_unknown_names_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'.*k3"):
        kl_estimate(D, D, estimator="k4")
    with pytest.raises(ValueError, match=r"unknown KL clamp 'hard'.*verl"):
        kl_estimate(D, D, clamp="hard")


def test_the_exact_kl_s_gradient_is_as_wide_as_the_distribution_it_is_of():
    narrow = torch.randn(5, 7).log_softmax(-1)
    for wide in (torch.float32, torch.float64):
        other = torch.randn(5, 7, dtype=wide).log_softmax(-1).requires_grad_()
        weight = torch.rand(5, dtype=wide)
        (kl_exact(narrow, other) * weight).sum().backward()
        assert other.grad.dtype == wide
        assert torch.equal(other.grad, -(narrow.exp() * weight[:, None]))
