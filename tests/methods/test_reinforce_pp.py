import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, outcome_only, per_row

from methods._case import Case
from methods.loops import clipped, ratio, returns, token_mean, token_rewards, whitened
from proxpo import Batch


def reinforce_pp(
    b: Batch, *, kl_coef: float, gamma: float = 1.0, unbiased: bool = True
) -> torch.Tensor:
    a = returns(token_rewards(b, kl_coef=kl_coef), b, gamma=gamma)
    return token_mean(clipped(ratio(b), whitened(a, unbiased=unbiased), 0.2, 0.2), b)


CASES = {
    "reinforce-pp": Case("reinforce-pp", {}, lambda b: reinforce_pp(b, kl_coef=0.01)),
    "reinforce-pp-population": Case(
        "reinforce-pp",
        {"whiten_unbiased": False, "gamma": 0.9, "kl_coef": 0.2},
        lambda b: reinforce_pp(b, kl_coef=0.2, gamma=0.9, unbiased=False),
    ),
}


PLAIN, BASELINE = ("reinforce-pp", {"kl_coef": 0.0}), ("reinforce-pp-baseline", {})


@pytest.mark.checks("reinforce-pp", "whitened over all valid tokens: mean 0, unbiased variance 1")
@pytest.mark.parametrize("slug", ["reinforce-pp", "reinforce-pp-baseline"])
def test_whitened(slug: str) -> None:
    batch = make_batch(1)
    valid = advantages(method(slug), batch)[batch.mask]
    close(valid.mean(), 0.0, atol=1e-8)
    close(valid.var(), 1.0, rtol=1e-6)
    population = advantages(method(slug, whiten_unbiased=False), batch)[batch.mask]
    close(population.var(unbiased=False), 1.0, rtol=1e-6)


def test_whitening_is_over_tokens_not_rows() -> None:
    """Standardising per response instead leaves the token mean away from 0: the wrong variant."""
    batch = outcome_only(make_batch(1))
    wrong = ((batch.rewards - batch.rewards.mean()) / batch.rewards.std())[:, None]
    assert wrong.expand_as(batch.mask)[batch.mask].mean().abs() > 1e-2


@pytest.mark.checks("reinforce-pp", "γ = 1, β = 0: one value per response, monotone in its reward")
def test_one_value_per_response() -> None:
    batch = outcome_only(make_batch(1))
    a = per_row(advantages(method(PLAIN[0], **PLAIN[1]), batch), batch)
    order = batch.rewards.argsort()
    assert (a[order].diff() >= -1e-12).all()
    assert a.unique().numel() > 2


@pytest.mark.checks("reinforce-pp", "baseline: invariant to shifts per prompt; plain: to one shift")
def test_shifts() -> None:
    batch = outcome_only(make_batch(1))
    per_prompt = batch.rewards + f64([3.0, -1.0, 0.0])[batch.group]
    plain, baseline = method(PLAIN[0], **PLAIN[1]), method(BASELINE[0])
    close(advantages(baseline, batch.replace(rewards=per_prompt)), advantages(baseline, batch))
    moved = advantages(plain, batch.replace(rewards=per_prompt))
    assert not torch.allclose(moved, advantages(plain, batch))
    close(advantages(plain, batch.replace(rewards=batch.rewards + 3)), advantages(plain, batch))


@pytest.mark.checks("reinforce-pp", "rewards times c > 0 change nothing without the KL")
@pytest.mark.parametrize(("slug", "options"), [PLAIN, BASELINE])
def test_scale(slug: str, options: dict) -> None:
    batch = outcome_only(make_batch(1))
    made = method(slug, **options)
    scaled = advantages(made, batch.replace(rewards=100 * batch.rewards))
    close(scaled, advantages(made, batch), rtol=1e-6, atol=1e-8)


@pytest.mark.checks("reinforce-pp", "equal rewards in a prompt: GRPO 0, the baseline variant -μ/σ")
def test_equal_rewards_are_not_silent() -> None:
    batch = outcome_only(make_batch(1))
    rewards = torch.where(batch.group == 2, 0.5, batch.rewards)
    batch = batch.replace(rewards=rewards)
    same = batch.mask & (batch.group == 2)[:, None]
    close(advantages(method("grpo"), batch)[same], 0.0, atol=0.0)
    a = advantages(method("dr-grpo"), batch)[batch.mask]
    expected = -a.mean() / (a.var() + 1e-8).sqrt()
    assert expected.abs() > 1e-3
    close(advantages(method(BASELINE[0]), batch)[same], expected)


def test_all_returns_equal() -> None:
    batch = outcome_only(make_batch(1))
    batch = batch.replace(rewards=torch.ones_like(batch.rewards))
    close(advantages(method(PLAIN[0], **PLAIN[1]), batch), 0.0 * batch.logp)


def test_one_token_cannot_be_whitened() -> None:
    batch = make_batch(1, groups=1, size=1, tokens=1)
    with pytest.raises(ValueError, match="at least two valid tokens"):
        advantages(method(PLAIN[0], **PLAIN[1]), batch)
