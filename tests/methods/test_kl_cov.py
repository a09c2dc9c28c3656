import math

import pytest
import torch
from helpers import close, loss_and_gradients, make_batch, method, on_policy, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import covariances, log_ratio, ratio, token_mean, unclipped, z_scores
from proxpo import Batch
from proxpo.stages.trust.covariance import covariance


def kl_cov(b: Batch) -> torch.Tensor:
    a = z_scores(b)
    cov, d = covariances(b, a), log_ratio(b)
    chosen = sorted(cov, key=cov.get, reverse=True)[: max(1, math.floor(0.2 * len(cov)))]
    x = unclipped(ratio(b), a)
    return token_mean({k: x[k] + (abs(d[k]) if k in chosen else 0.0) for k in x}, b)


CASES = {
    "kl-cov": Case("kl-cov", {"share": 0.2}, kl_cov),
}


TOKEN_MEAN = {"aggregate": "token_mean"}


def chosen(batch: object, **options: object) -> torch.Tensor:
    penalised = policy_gradient(method("kl-cov", **options), batch)
    return penalised != policy_gradient(method("kl-cov", coef=0.0, **options), batch)


@pytest.mark.checks("kl-cov", "β = 0: -mean(A·r), importance sampling without a clip")
def test_no_penalty() -> None:
    batch = make_batch(1)
    expected = loss_and_gradients(method("grpo", trust="unclipped", **TOKEN_MEAN), batch)
    for options in ({"coef": 0.0}, {"share": 0.0}):
        value, grads = loss_and_gradients(method("kl-cov", **options), batch)
        close(value, expected[0])
        close(grads, expected[1])


@pytest.mark.checks("kl-cov", "chosen: (-A·r + β·sign(logp - old))/N; others -A·r/N")
def test_gradient() -> None:
    batch = make_batch(1)
    base = policy_gradient(method("kl-cov", share=0.3, coef=0.0), batch)
    found = policy_gradient(method("kl-cov", share=0.3, coef=0.7), batch)
    sign = (batch.logp - batch.old_logp).sign()
    taken = chosen(batch, share=0.3)
    close(found, base + 0.7 * sign * taken / batch.mask.double().sum())


@pytest.mark.checks("kl-cov", "logp = old everywhere: REINFORCE's gradient for any β")
def test_inert_on_policy() -> None:
    batch = on_policy(make_batch(1))
    reinforce = method("reinforce", advantage="group_relative", **TOKEN_MEAN)
    found = policy_gradient(method("kl-cov", share=0.5, coef=9.0), batch)
    close(found, policy_gradient(reinforce, batch))


@pytest.mark.checks("kl-cov", "max(1, ⌊kN⌋) tokens, those of largest covariance")
@pytest.mark.parametrize("share", [2e-3, 0.1, 0.5])
def test_selection(share: float) -> None:
    batch = make_batch(1)
    taken = chosen(batch, share=share)
    n = int(batch.mask.sum())
    assert taken.sum() == max(1, int(share * n))
    cov = covariance(proxpo.prepare(method("kl-cov"), batch).batch)
    assert cov[taken].min() >= cov[batch.mask & ~taken].max()


@pytest.mark.checks("kl-cov", "the choice ignores constants added to A or to logp")
def test_shifts() -> None:
    batch = make_batch(1)
    ready = proxpo.prepare(method("kl-cov"), batch).batch
    shifted = batch.replace(advantages=ready.advantages + 3.0)
    moved = batch.replace(logp=batch.logp + 1.0, old_logp=batch.old_logp + 1.0)
    taken = chosen(batch, share=0.2)
    assert torch.equal(chosen(shifted, share=0.2), taken)
    assert torch.equal(chosen(moved, share=0.2), taken)


def test_share_is_a_fraction_not_a_percentage() -> None:
    batch = make_batch(1, groups=8, size=8, tokens=40, holes=False)
    n = int(batch.mask.sum())
    assert chosen(batch).sum() == max(1, int(2e-3 * n)) > 1
    assert method("kl-cov").regularisers[0].options["share"] == 2e-3
