import math

import pytest
import torch
from helpers import close, f64, loss_and_gradients, make_batch, method

import proxpo
from methods._case import Case
from methods.loops import clipped, ratio, seq_mean_token_mean, z_scores
from proxpo import Batch
from proxpo.types import Clock

CASES = {
    "redit": Case(
        "redit",
        {"noise": 0.0},
        lambda b: seq_mean_token_mean(clipped(ratio(b), z_scores(b), 0.2, 0.2), b),
    ),
}


SLUG = "redit"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dithered(batch: Batch, seed: int, *, step: int = 0, **options: object) -> Batch:
    made = method(SLUG, **options)
    return proxpo.prepare(
        made, batch, proxpo.Context(generator=seeded(seed), clock=Clock(step=step))
    ).batch


def flat(rewards: list[float]) -> Batch:
    """One group of single-token responses with these rewards."""
    batch = make_batch(1, groups=1, size=len(rewards), tokens=1, holes=False)
    return batch.replace(rewards=f64(rewards))


@pytest.mark.checks(SLUG, "σ = 0 is the base method")
@pytest.mark.parametrize("distribution", ["gaussian", "uniform"])
def test_no_noise(distribution: str) -> None:
    batch = make_batch(2)
    found = loss_and_gradients(method(SLUG, noise=0, distribution=distribution), batch)
    for ours, base in zip(found, loss_and_gradients(method("grpo"), batch)):
        close(ours, base, rtol=0, atol=0)


def test_noise_enters_before_the_advantage() -> None:
    """GRPO's plain loops on the rewards that the same generator dithers."""
    batch = make_batch(2)
    noise = 0.05 * torch.randn(len(batch.rewards), generator=seeded(5), dtype=torch.float64)
    found, _ = loss_and_gradients(method(SLUG), batch, proxpo.Context(generator=seeded(5)))
    close(found, CASES["redit"].reference(batch.replace(rewards=batch.rewards + noise)))
    close(dithered(batch, 5).rewards, batch.rewards + noise)


@pytest.mark.checks(SLUG, "centred advantages are unbiased under the noise")
def test_unbiased() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    batch = flat(rewards * 20_000)
    batch = batch.replace(group=torch.arange(len(batch.mask)) // 5)
    found = dithered(batch, 1, scale="none", noise=0.3).advantages[:, 0].view(-1, 5)
    error = 0.3 * math.sqrt(1 - 1 / 5) / math.sqrt(len(found))
    assert (found.mean(0) - f64([0.4, -0.6, -0.6, 0.4, 0.4])).abs().max() < 5 * error


@pytest.mark.checks(SLUG, "equal rewards, centred: the variance of A is σ²(1 - 1/G)")
def test_variance_of_equal_rewards() -> None:
    batch = flat([1.0] * 80_000)
    batch = batch.replace(group=torch.arange(len(batch.mask)) // 4)
    found = dithered(batch, 2, scale="none").advantages
    close(found.var(), 0.05**2 * 0.75, rtol=0.03)


@pytest.mark.checks(SLUG, "equal rewards, standardised: mean 0, std σ̂/(σ̂ + δ), about 1")
def test_standardised_noise_has_full_size() -> None:
    batch = flat([1.0] * 6)
    ready = dithered(batch, 3, noise=1e-3, eps=1e-4)
    spread = ready.rewards.std()
    found = ready.advantages[:, 0]
    close(found.mean(), 0.0)
    close(found.std(), spread / (spread + 1e-4))
    assert found.std() > 0.8


@pytest.mark.checks(SLUG, "same seed, same noise; another draw, other noise; uniform within ±a")
def test_determinism_and_range() -> None:
    batch = flat([0.0] * 5000)
    first = dithered(batch, 4, distribution="uniform").rewards
    assert torch.equal(first, dithered(batch, 4, distribution="uniform").rewards)
    assert not torch.equal(first, dithered(batch, 5, distribution="uniform").rewards)
    goes_on, made = seeded(4), method(SLUG, distribution="uniform")
    steps = [
        proxpo.prepare(made, batch, proxpo.Context(generator=goes_on)).batch.rewards
        for _ in range(2)
    ]
    assert torch.equal(steps[0], first)
    assert not torch.equal(steps[1], first)  # the next step of the run draws anew
    assert 0.0499 < first.abs().max() <= 0.05
    close(first.std(), 0.05 / math.sqrt(3), rtol=0.03)


@pytest.mark.checks(SLUG, "noise below half the gap between rewards keeps their order")
def test_order() -> None:
    batch = flat([0.0, 1.0] * 500)
    found = dithered(batch, 6, distribution="uniform").rewards
    assert found[1::2].min() > found[::2].max()


def test_scale_may_follow_the_step() -> None:
    batch = flat([0.0] * 8)
    early, late = (
        dithered(batch, 7, step=step, noise=lambda step: 1 / (1 + step)).rewards for step in (0, 3)
    )
    close(early, 4 * late)


def test_filters_see_the_rewards_as_they_were_and_missing_ones_stay_missing() -> None:
    batch = make_batch(1).replace(correct=None)
    batch = batch.replace(rewards=torch.where(batch.group == 0, 1.0, batch.rewards))
    rewards = batch.rewards.clone()
    rewards[4] = math.nan
    ready = proxpo.prepare(method(SLUG, filter="informative"), batch.replace(rewards=rewards))
    assert not ready.batch.mask[batch.group == 0].any()
    assert ready.batch.rewards[4].isnan()


def test_any_recipe_takes_it() -> None:
    made = method("dapo", **{"reward+": "dither", "reward.dither.scale": 0.2})
    assert [stage.name for stage in made.reward] == ["overlong_penalty", "dither"]
    with pytest.raises(ValueError, match="must not be negative"):
        method("grpo", **{"reward": "dither", "reward.dither.scale": -1})
    with pytest.raises(ValueError, match="dither"):
        method("grpo", **{"reward": "dither", "reward.dither.scale": "much"})
