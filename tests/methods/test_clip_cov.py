import pytest
import torch
from helpers import (
    advantages,
    close,
    loss_and_gradients,
    make_batch,
    method,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import clipped, covariances, ratio, token_mean, z_scores
from proxpo import Batch
from proxpo.stages.trust.covariance import covariance


def clip_cov(b: Batch) -> torch.Tensor:
    """With so large a share that every eligible token is taken."""
    a, r = z_scores(b), ratio(b)
    x, cov = clipped(r, a, 1.0, 0.2), covariances(b, a)
    for k in x:
        outside = (a[k] > 0 and r[k] > 1.2) or (a[k] < 0 and r[k] < 0.0)
        if not outside and 0.1 < cov[k] < 5:
            x[k] = 0.0 * x[k]
    return token_mean(x, b)


CASES = {
    "clip-cov": Case("clip-cov", {"share": 1.0, "cov_low": 0.1, "clip_high": 0.2}, clip_cov),
}


ALL = {"share": 1.0, "cov_low": 0.1, "cov_high": 5.0}


def base(**options: object) -> object:
    """GRPO with the same clip and average."""
    return method("grpo", clip_low=1.0, clip_high=1.0, aggregate="token_mean", **options)


def removed(made: object, batch: object, seed: int = 0) -> torch.Tensor:
    """Tokens whose gradient differs from plain GRPO's."""
    generator = torch.Generator().manual_seed(seed)
    return policy_gradient(made, batch, proxpo.Context(generator=generator)) != policy_gradient(
        base(), batch
    )


@pytest.mark.checks("clip-cov", "no token eligible: PPO/GRPO's token mean with the same clip")
def test_none_eligible() -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method("clip-cov", cov_low=1e9, cov_high=2e9), batch)
    expected = loss_and_gradients(base(), batch)
    close(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.checks("clip-cov", "chosen tokens have no gradient, all others theirs unchanged")
def test_others_are_untouched() -> None:
    batch = make_batch(1)
    found, plain = policy_gradient(method("clip-cov", **ALL), batch), policy_gradient(base(), batch)
    gone = found != plain
    assert 0 < gone.sum() < batch.mask.sum()
    close(found, torch.where(gone, 0.0, plain), atol=0.0)


@pytest.mark.checks("clip-cov", "the mean of Cov over valid tokens is the masked covariance")
def test_covariance() -> None:
    batch = proxpo.prepare(base(), make_batch(1)).batch
    pairs = torch.stack([batch.advantages[batch.mask], batch.logp[batch.mask]])
    close(covariance(batch)[batch.mask].mean(), torch.cov(pairs, correction=0)[0, 1])


@pytest.mark.checks("clip-cov", "at most max(1, ⌊κN⌋) are chosen; all in bounds and unclipped")
@pytest.mark.parametrize("share", [2e-4, 0.07, 0.2, 1.0])
def test_how_many_and_which(share: float) -> None:
    batch = make_batch(1, groups=4, tokens=8)
    made = method("clip-cov", share=share, cov_low=0.1, clip_high=0.3)
    plain = method("grpo", clip_low=1.0, clip_high=0.3, aggregate="token_mean")
    gone = policy_gradient(made, batch) != policy_gradient(plain, batch)
    n = int(batch.mask.sum())
    ready = proxpo.prepare(made, batch).batch
    cov, r = covariance(ready), (batch.logp - batch.old_logp).exp()
    clipped = (ready.advantages > 0) & (r > 1.3)
    eligible = batch.mask & (cov > 0.1) & (cov < 5.0) & ~clipped
    assert gone.sum() == min(max(1, int(share * n)), int(eligible.sum()))
    assert not (gone & ~eligible).any()


@pytest.mark.checks("clip-cov", "as many eligible as chosen: the draw leaves nothing to chance")
def test_deterministic_when_all_are_taken() -> None:
    batch = make_batch(1)
    taken = [removed(method("clip-cov", **ALL), batch, seed) for seed in range(3)]
    assert torch.equal(taken[0], taken[1])
    assert torch.equal(taken[0], taken[2])
    few = {**ALL, "share": 2e-4}
    drawn = [removed(method("clip-cov", **few), batch, seed) for seed in range(8)]
    assert all(one.sum() == 1 for one in drawn)
    assert any(not torch.equal(drawn[0], one) for one in drawn)
    assert torch.equal(drawn[3], removed(method("clip-cov", **few), batch, 3))


@pytest.mark.checks("clip-cov", "constant advantages: Cov = 0 and nothing is chosen")
def test_constant_advantages() -> None:
    batch = make_batch(1).replace(advantages=torch.full((9,), 0.7).double())
    made = method("clip-cov", share=1.0, cov_low=0.0)
    close(policy_gradient(made, batch), policy_gradient(base(), batch))


def test_paper_detaches_where_the_code_zeroes() -> None:
    batch = make_batch(1)
    kept, zeroed = (method("clip-cov", keep_value=k, **ALL) for k in (True, False))
    (a, ga), (b, gb) = (loss_and_gradients(made, batch) for made in (kept, zeroed))
    close(ga, gb)
    close(a, loss_and_gradients(base(), batch)[0])
    assert abs(a - b) > 1e-3
    assert advantages(kept, batch).abs().max() > 0
