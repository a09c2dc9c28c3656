import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close, f64, loss_and_gradients, make_batch, method

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    clipped,
    everywhere,
    groups,
    informative,
    k3,
    kept,
    mean,
    plus,
    ratio,
    seq_mean_token_mean,
    sequence_ratio,
    std,
)
from proxpo import Batch
from proxpo.logp import score_features
from proxpo.stages.reward import gradient_novelty
from proxpo.stages.reward.novelty import novelty
from proxpo.types import Context


def cosine(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y)) / (math.hypot(*x) * math.hypot(*y))


def novelties(b: Batch, members: list[int]) -> dict[int, float]:
    phi, r, out = b.features.tolist(), b.rewards.tolist(), {}
    for i in members:
        others = [j for j in members if j != i]
        total = sum(math.exp(r[j]) for j in others)
        seen = sum(math.exp(r[j]) / total * cosine(phi[i], phi[j]) ** 2 for j in others)
        out[i] = max(1 - seen, 0.0)
    return out


def novel_rewards(b: Batch, factor: Callable[[float, float], float], clip: float) -> list[float]:
    out = b.rewards.tolist()
    for members in groups(b).values():
        nu = novelties(b, members)
        low, high = min(nu.values()), max(nu.values())
        for i in members:
            f = factor(out[i], (nu[i] - low) / (high - low)) if high - low > 1e-6 else 1.0
            out[i] = min(max(out[i] * f, -clip), clip)
    return out


def g2rl_advantages(
    b: Batch, factor: Callable[[float, float], float], *, clip: float = 3.0, ddof: int = 0
) -> Numbers:
    r, out = novel_rewards(b, factor, clip), {}
    for members in groups(b).values():
        mine = [r[i] for i in members]
        for i in members:
            out[i] = (r[i] - mean(mine)) / (std(mine, ddof=ddof) + 1e-6)
    return everywhere(out, b)


def g2rl(b: Batch, factor: Callable[[float, float], float], *, clip: float = 3.0) -> Any:
    x = clipped(ratio(b), g2rl_advantages(b, factor, clip=clip), 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (0.001, k3(b, b.ref_logp))), b)


def g2rl_signed(b: Batch) -> torch.Tensor:
    a = g2rl_advantages(b, lambda r, nu: 1 + (2 * nu - 1), ddof=1)
    rows = informative(b)
    rest = kept(b, lambda i, t: i in rows)
    x = clipped(sequence_ratio(rest, normalise=False), a, 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (0.001, k3(rest, b.ref_logp))), rest)


CASES = {
    "g2rl": Case("g2rl", {}, lambda b: g2rl(b, lambda r, nu: 1 + nu)),
    "g2rl-printed": Case(
        "g2rl",
        {"reading": "printed", "strength": 2.0, "reward_clip": 1.5},
        lambda b: g2rl(b, lambda r, nu: 1 + 2 * r * nu, clip=1.5),
    ),
    "g2rl-signed": Case(
        "g2rl",
        {"reading": "signed", "level": "sequence", "unbiased": True, "skip_uniform": True},
        g2rl_signed,
    ),
}


RIGHT_AND_WRONG = f64([1, -1, 1, -1, 1, -1, -1, 1, 1])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def of_one_group(features: torch.Tensor, rewards: torch.Tensor | None = None) -> torch.Tensor:
    rewards = drawn(len(features), seed=9) if rewards is None else rewards
    return novelty(features, rewards, torch.zeros(len(features), dtype=torch.int64))


def shaped(batch: Batch, **options: object) -> torch.Tensor:
    return gradient_novelty(**options).apply(batch, Context())[0].rewards


@pytest.fixture
def batch() -> Batch:
    return make_batch(1).replace(rewards=RIGHT_AND_WRONG)


@pytest.mark.checks("g2rl", "λ = 0: GRPO")
def test_without_strength(batch: Batch) -> None:
    value, grads = loss_and_gradients(method("g2rl", strength=0.0, unbiased=True), batch)
    expected, expected_grads = loss_and_gradients(method("grpo", kl_coef=0.001), batch)
    close(value, expected)
    close(grads, expected_grads)


@pytest.mark.checks("g2rl", "φ_t is τ times d log p(y_t)/dh_t and W[y] - Σ p W; Φ is its mean")
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_features(chunk: int | None, temperature: float) -> None:
    hidden, weight, bias = drawn(3, 4, 5), drawn(11, 5, seed=1), drawn(11, seed=2)
    targets = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    spoilt = torch.where(mask[..., None], hidden, math.nan)
    found = score_features(
        spoilt, weight, targets, mask, bias=bias, temperature=temperature, chunk=chunk
    )
    leaf = hidden.clone().requires_grad_()
    every = ((leaf @ weight.T + bias) / temperature).log_softmax(-1)
    logp = every.gather(2, targets[..., None])[..., 0]
    (pull,) = torch.autograd.grad(logp.sum(), leaf)
    phi = weight[targets] - every.detach().exp() @ weight
    close(temperature * pull, phi)
    count = mask.sum(1, keepdim=True).clamp(min=1)
    close(found, (phi * mask[..., None]).sum(1) / count)
    assert not found.requires_grad


def test_features_in_half_precision_sum_up_in_float32() -> None:
    hidden, weight = drawn(2, 4, 5).bfloat16(), drawn(11, 5, seed=1).bfloat16()
    targets, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool)
    found = score_features(hidden, weight, targets, mask)
    assert found.dtype == torch.float32
    exact = score_features(hidden.double(), weight.double(), targets, mask)
    close(found, exact, rtol=0.05, atol=0.03)


@pytest.mark.checks("g2rl", "all Φ parallel, of either sign: ν = 0, and rewards stay")
def test_parallel(batch: Batch) -> None:
    along = drawn(1, 3) * f64([2.0, -1.0, 0.5, -7.0])[:, None]
    close(of_one_group(along), torch.zeros(4).double())
    same = batch.replace(features=drawn(1, 3) * drawn(9, 1, seed=4))
    close(shaped(same, reading="signed"), batch.rewards, atol=0.0)


@pytest.mark.checks("g2rl", "mutually orthogonal Φ: ν = 1")
def test_orthogonal() -> None:
    close(of_one_group(torch.eye(4).double()), torch.ones(4).double())
    close(of_one_group(torch.zeros(3, 4).double()), torch.ones(3).double())


@pytest.mark.checks("g2rl", "ν does not depend on the length or sign of any Φ")
def test_rescaling() -> None:
    phi = drawn(5, 3)
    scale = f64([3.0, -1.0, 1e-3, -50.0, 1.0])[:, None]
    close(of_one_group(phi * scale), of_one_group(phi), rtol=1e-9)


@pytest.mark.checks("g2rl", "0 ≤ ν ≤ 1 and |r̃| ≤ 3")
def test_bounds(batch: Batch) -> None:
    for seed in range(5):
        nu = of_one_group(drawn(6, 2, seed=seed), 5 * drawn(6, seed=seed + 50))
        assert (nu >= 0).all()
        assert (nu <= 1).all()
    for reading in ("printed", "described", "signed"):
        found = shaped(batch, reading=reading, strength=9.0)
        assert found.abs().max() == 3


@pytest.mark.checks("g2rl", "raising r_j raises the weight of j in the novelty of every other")
def test_weights() -> None:
    phi = torch.stack([f64([1.0, 0.0]), f64([1.0, 0.0]), f64([0.0, 1.0])])
    even = of_one_group(phi, f64([0.0, 0.0, 0.0]))
    close(even, f64([0.5, 0.5, 1.0]))
    lifted = of_one_group(phi, f64([0.0, 1.0, 0.0]))
    close(lifted[0], 1 - math.e / (math.e + 1))
    close(lifted[1:], even[1:])  # nobody weighs himself; 2 is orthogonal to both
    large = of_one_group(phi, f64([1000.0, 1000.0, 1000.0]))
    close(large, even)


@pytest.mark.checks("g2rl", "r = -1: printed gives -1 + λν̄, described -1 - λν̄")
def test_readings(batch: Batch) -> None:
    r, nu = batch.rewards, novelty(batch.features, batch.rewards, batch.group)
    low = torch.stack([nu[3 * g : 3 * g + 3].min() for g in range(3)]).repeat_interleave(3)
    high = torch.stack([nu[3 * g : 3 * g + 3].max() for g in range(3)]).repeat_interleave(3)
    share = (nu - low) / (high - low)
    close(shaped(batch, reading="printed", strength=0.5), r + 0.5 * share)
    close(shaped(batch, reading="described", strength=0.5), r * (1 + 0.5 * share))
    close(shaped(batch, reading="signed", strength=0.5), r * (1 + 0.5 * (2 * share - 1)))
    close(shaped(batch), shaped(batch, reading="described"), atol=0.0)


def test_equal_rewards_get_a_gradient_unless_unwanted(batch: Batch) -> None:
    same = batch.replace(rewards=torch.ones(9).double(), correct=None)
    bare = method("g2rl", kl_coef=0.0)
    assert loss_and_gradients(bare, same)[1]["logp"].abs().max() > 1e-3
    careful = method("g2rl", kl_coef=0.0, skip_uniform=True)
    assert loss_and_gradients(careful, same)[1]["logp"].eq(0).all()


def test_what_is_missing_is_said(batch: Batch) -> None:
    with pytest.raises(proxpo.ProxpoError, match=r"'features'.*proxpo.logp.score_features"):
        proxpo.loss_fn(method("g2rl"))(batch.replace(features=None))


def test_small_groups_keep_their_rewards() -> None:
    for size in (1, 2):
        batch = make_batch(1, groups=3, size=size)
        for reading in ("printed", "described", "signed"):
            close(shaped(batch, reading=reading), batch.rewards, atol=0.0)


def test_unscored_responses_are_nobodys_other(batch: Batch) -> None:
    rewards = batch.rewards.clone()
    rewards[0] = math.nan
    found = shaped(batch.replace(rewards=rewards))
    assert found[0].isnan()
    close(found[1:3], rewards[1:3])  # two are left, whose novelties agree
