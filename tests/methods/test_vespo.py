import pytest
import torch
from helpers import advantages, close, crafted, f64, make_batch, method, on_policy, policy_gradient

from methods._case import Case
from methods.loops import Terms, exp, number, sequence_ratio, token_mean, weighted_score, z_scores
from proxpo import Batch


def vespo(b: Batch, pos: tuple[float, float], neg: tuple[float, float]) -> torch.Tensor:
    a, weight = z_scores(b), {}
    ratio: Terms = sequence_ratio(b, normalise=False)
    for k in ratio:
        w, (power, rate) = number(ratio[k]), pos if a[k] >= 0 else neg
        weight[k] = w**power * exp(rate * (1 - w))
    return token_mean(weighted_score(weight, a, b), b)


CASES = {
    "vespo": Case("vespo", {}, lambda b: vespo(b, (2.0, 3.0), (3.0, 2.0))),
    "vespo-options": Case(
        "vespo",
        {"k_pos": 0.5, "lambda_pos": 0.0, "k_neg": 0.0, "lambda_neg": 4.0},
        lambda b: vespo(b, (0.5, 0.0), (0.0, 4.0)),
    ),
}


def weight(w: torch.Tensor, sign: float, **options: float) -> torch.Tensor:
    """φ(W): what the update of a response of two tokens with this ratio is multiplied by."""
    batch = crafted(torch.stack([w.log(), torch.zeros_like(w)], dim=1).tolist(), [sign] * len(w))
    return -policy_gradient(method("vespo", **options), batch)[:, 0] * batch.mask.sum() / sign


@pytest.mark.checks("vespo", "fresh data: φ(1) = 1 and L is REINFORCE, -A/N per token")
def test_fresh_data() -> None:
    batch = on_policy(make_batch(1))
    made = method("vespo", k_pos=5.0, lambda_neg=7.0)
    close(policy_gradient(made, batch), -advantages(made, batch) * batch.mask / batch.mask.sum())


@pytest.mark.checks("vespo", "φ rises to W = k/λ and falls beyond it, to 0 at both ends")
@pytest.mark.parametrize(("sign", "peak"), [(1.0, 2 / 3), (-1.0, 3 / 2)])
def test_one_peak(sign: float, peak: float) -> None:
    below, above = torch.linspace(0.01, peak, 9).double(), torch.linspace(peak, 12, 9).double()
    assert (weight(below, sign).diff() > 0).all()
    assert (weight(above, sign).diff() < 0).all()
    assert (weight(f64([1e-30, 1e30]), sign) < 1e-12).all()


@pytest.mark.checks("vespo", "extreme ratios and exponents give no number that is not finite")
def test_extremes() -> None:
    found = weight(f64([1e-300, 1e-9, 1.0, 1e9, 1e300]), 1.0, k_pos=200.0, lambda_pos=1e-3)
    assert found.isfinite().all()


@pytest.mark.checks("vespo", "k = 1, λ = 0: the product of all ratios, without a bound")
def test_plain_importance_weight() -> None:
    w = f64([0.2, 1.0, 3.0])
    close(weight(w, 1.0, k_pos=1.0, lambda_pos=0.0), w)


def test_a_hole_is_no_part_of_the_product() -> None:
    batch, made = make_batch(1), method("vespo")
    assert (batch.mask.sum(1) < batch.mask.shape[1]).any()
    moved = batch.replace(old_logp=torch.where(batch.mask, batch.old_logp, -9.0))
    close(policy_gradient(made, moved), policy_gradient(made, batch))
