import pytest
import torch
from helpers import close, crafted, f64, loss_and_gradients, make_batch, method, on_policy
from helpers import policy_gradient as gradient_of

from methods._case import Case
from methods.loops import Terms, ratio, sequence_ratio, token_mean, unclipped, z_scores
from proxpo.stages.ratio import smoothed
from proxpo.types import Batch, Context


def mixed(r: Terms, alpha: float) -> Terms:
    return {k: (1 - alpha) * v + alpha for k, v in r.items()}


CASES = {
    "pspo": Case("pspo", {}, lambda b: token_mean(unclipped(mixed(ratio(b), 0.1), z_scores(b)), b)),
    "pspo-sequence": Case(
        "pspo",
        {"level": "sequence", "alpha": 0.3},
        lambda b: token_mean(unclipped(mixed(sequence_ratio(b), 0.3), z_scores(b)), b),
    ),
}


SLUG = "pspo"
LEVELS = ["token", "sequence"]


def mixed_ratio(batch: Batch, **options: object) -> torch.Tensor:
    return smoothed(**options).apply(batch, Context())[0]


@pytest.mark.checks(SLUG, "r̃ = 1 on-policy for every α; r̃ > α")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7, 1.0])
def test_range_of_the_ratio(level: str, alpha: float) -> None:
    batch = make_batch(1)
    close(mixed_ratio(on_policy(batch), alpha=alpha, level=level), torch.ones_like(batch.logp))
    far = batch.replace(logp=batch.old_logp - 9.0)
    assert (mixed_ratio(far, alpha=alpha, level=level) >= alpha).all()
    assert (mixed_ratio(far, alpha=alpha, level=level) < alpha + 1e-3 + (alpha == 0)).all()


@pytest.mark.checks(SLUG, "gradient(α) = (1-α)·gradient(0) on every token; none at α = 1")
@pytest.mark.parametrize("level", LEVELS)
def test_gradient_shrinks_uniformly(level: str) -> None:
    batch = make_batch(1, spread=0.6)
    whole = gradient_of(method(SLUG, alpha=0.0, level=level), batch)
    for alpha in (0.1, 0.5, 1.0):
        found = gradient_of(method(SLUG, alpha=alpha, level=level), batch)
        close(found, (1 - alpha) * whole)
    assert whole.abs().max() > 0.05


@pytest.mark.checks(SLUG, "α = 0: the unclipped importance-weighted surrogate, -r·A/n")
def test_without_smoothing() -> None:
    batch = make_batch(1, spread=0.6)
    plain = method("grpo", trust="unclipped", aggregate="token_mean")
    value, grads = loss_and_gradients(method(SLUG, alpha=0.0), batch)
    other = loss_and_gradients(plain, batch)
    close(value, other[0])
    close(grads["logp"], other[1]["logp"])


@pytest.mark.checks(SLUG, "A → -A flips loss and gradient: there is no min")
def test_sign_symmetric() -> None:
    batch = crafted([[0.9, -0.8, 0.1]], [[1.0, -2.0, 0.5]])
    there = loss_and_gradients(method(SLUG), batch)
    back = loss_and_gradients(method(SLUG), batch.replace(advantages=-batch.advantages))
    close(back[0], -there[0])
    close(back[1]["logp"], -there[1]["logp"])


@pytest.mark.checks(SLUG, "the mixed policy is (1-α) as far from the old one in total variation")
def test_total_variation() -> None:
    """Every token of a vocabulary of five as one batch of single tokens."""
    new, old = f64([0.5, 0.2, 0.1, 0.15, 0.05]), f64([0.1, 0.3, 0.3, 0.1, 0.2])
    batch = crafted((new / old).log()[:, None], [1.0] * 5)
    for alpha in (0.1, 0.4):
        mixed = mixed_ratio(batch, alpha=alpha)[:, 0] * old
        close(mixed.sum(), 1.0)
        close((mixed - old).abs().sum(), (1 - alpha) * (new - old).abs().sum())


def test_default_is_a_tenth() -> None:
    assert method(SLUG).ratio.options == {"alpha": 0.1, "level": "token"}


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
        method(SLUG, alpha=alpha)
