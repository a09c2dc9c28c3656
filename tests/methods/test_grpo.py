import math

import pytest
import torch
from helpers import (
    advantages,
    close,
    crafted,
    f64,
    make_batch,
    method,
    on_policy,
    outcome_only,
    per_row,
    policy_gradient,
)

from methods._case import Case
from methods.loops import (
    centred,
    clipped,
    everywhere,
    grpo_terms,
    k3,
    mean,
    number,
    plus,
    process_scores,
    ratio,
    row,
    seq_mean_token_mean,
    std,
    z_scores,
)
from proxpo import Batch, loss_fn, make_recipe
from proxpo.stages.trust import ppo_clip


def grpo_batch(b: Batch) -> torch.Tensor:
    a = {i: x / (std(b.rewards.tolist()) + 1e-4) for i, x in centred(b).items()}
    return seq_mean_token_mean(clipped(ratio(b), everywhere(a, b), 0.2, 0.2), b)


def grpo_kl(b: Batch, *, corrected: bool) -> torch.Tensor:
    r = ratio(b)
    penalty = {k: (r[k] if corrected else 1.0) * v for k, v in k3(b, b.ref_logp).items()}
    return seq_mean_token_mean(plus(grpo_terms(b), (0.04, penalty)), b)


def grpo_stale_mask(b: Batch) -> torch.Tensor:
    x, a = grpo_terms(b), z_scores(b)
    for i in range(len(b.mask)):
        drift = [number(b.rollout_logp[i, t]) - number(b.logp[i, t]) for t in row(b, i)]
        for t in row(b, i):
            if a[i, t] < 0 and mean(drift) > 0.05:
                x[i, t] = 0.0 * x[i, t]
    return seq_mean_token_mean(x, b)


CASES = {
    "grpo": Case("grpo", {}, lambda b: seq_mean_token_mean(grpo_terms(b), b)),
    "grpo-kl": Case("grpo", {"kl_coef": 0.04}, lambda b: grpo_kl(b, corrected=False)),
    "grpo-kl-corrected": Case(
        "grpo", {"kl_coef": 0.04, "kl_ratio_corrected": True}, lambda b: grpo_kl(b, corrected=True)
    ),
    "grpo-batch": Case("grpo", {"scale": "batch", "eps": 1e-4}, grpo_batch),
    "grpo-process": Case(
        "grpo",
        {"process": True},
        lambda b: seq_mean_token_mean(clipped(ratio(b), process_scores(b), 0.2, 0.2), b),
    ),
    "grpo-capped": Case(
        "grpo",
        {"ratio_cap": 1.3, "dual": 1.25},
        lambda b: seq_mean_token_mean(grpo_terms(b, cap=1.3, dual=1.25), b),
    ),
    "grpo-stale-mask": Case("grpo", {"off_policy_threshold": 0.05}, grpo_stale_mask),
}


def rewarded(rewards: list[float], size: int, **options: object) -> torch.Tensor:
    batch = make_batch(1, groups=len(rewards) // size, size=size)
    batch = batch.replace(rewards=f64(rewards))
    return per_row(advantages(method("grpo", **options), batch), batch)


@pytest.mark.checks("grpo", "advantages of a group sum to 0 with std = std/(std+δ)")
def test_standardised() -> None:
    batch = make_batch(1)
    for eps in (1e-6, 1e-4, 0.5):
        a = per_row(advantages(method("grpo", eps=eps), batch), batch).view(3, 3)
        close(a.sum(1), torch.zeros(3))
        std = batch.rewards.view(3, 3).std(1)
        close(a.std(1), std / (std + eps))


@pytest.mark.checks("grpo", "G = 2, different rewards: A = ±1/√2")
def test_two_responses() -> None:
    close(rewarded([3.0, 1.0], 2), f64([1.0, -1.0]) / math.sqrt(2), rtol=1e-6)
    biased = f64([1.0, -1.0])  # what a population std would give: the wrong variant
    assert not torch.allclose(rewarded([3.0, 1.0], 2), biased, rtol=1e-2)


@pytest.mark.checks("grpo", "binary rewards, success rate p: √((1-p)/p) and -√(p/(1-p))")
def test_binary_rewards() -> None:
    right, size = 3, 12
    p = right / size
    a = rewarded([1.0] * right + [0.0] * (size - right), size)
    shrink = math.sqrt((size - 1) / size)
    close(a[0], shrink * math.sqrt((1 - p) / p), rtol=1e-5)
    close(a[-1], -shrink * math.sqrt(p / (1 - p)), rtol=1e-5)


@pytest.mark.checks("grpo", "r → a·r + b with a > 0 leaves A unchanged")
def test_affine_invariance() -> None:
    batch, made = make_batch(1), method("grpo", eps=1e-12)
    moved = batch.replace(rewards=3 * batch.rewards + 8)
    close(advantages(made, moved), advantages(made, batch), rtol=1e-9, atol=1e-9)


@pytest.mark.checks("grpo", "β = 0, r = 1: dloss/dlogp = -A/(B·L_i)")
def test_gradient_on_policy() -> None:
    batch, made = on_policy(make_batch(1)), method("grpo")
    weight = 1 / (len(batch.mask) * batch.mask.double().sum(1, keepdim=True))
    close(policy_gradient(made, batch), -advantages(made, batch) * weight)


@pytest.mark.checks("grpo", "the KL part's gradient is β(1 - e^{ref-logp}), 0 at logp = ref")
def test_kl_gradient() -> None:
    batch = make_batch(1)
    weight = batch.mask / (len(batch.mask) * batch.mask.double().sum(1, keepdim=True))

    def kl_part(b: object) -> torch.Tensor:
        return policy_gradient(method("grpo", kl_coef=0.3), b) - policy_gradient(method("grpo"), b)

    close(kl_part(batch), 0.3 * (1 - (batch.ref_logp - batch.logp).exp()) * weight)
    close(kl_part(batch.replace(ref_logp=batch.logp)), 0.0 * batch.logp)


@pytest.mark.checks("grpo", "token mean and 1.28 make it DAPO; no std and a constant Dr. GRPO")
def test_relatives() -> None:
    batch = make_batch(1)
    as_dapo = method("grpo", aggregate="token_mean", clip_high=0.28)
    close(policy_gradient(as_dapo, batch), policy_gradient(method("dapo"), batch))
    constant = {"name": "constant_length", "max_tokens": 9}
    as_dr = method("grpo", scale="none", aggregate=constant)
    close(policy_gradient(as_dr, batch), policy_gradient(method("dr-grpo", max_tokens=9), batch))


def test_zero_variance_is_exactly_zero() -> None:
    """0.1 three times has a rounded mean that is not 0.1; A must still be 0, not 1e-11/δ."""
    assert rewarded([0.1] * 3, 3, eps=1e-12).tolist() == [0.0, 0.0, 0.0]


def test_group_of_one() -> None:
    assert rewarded([0.7, -2.0], 1).tolist() == [0.7, -2.0]
    assert rewarded([0.7, -2.0], 1, singleton="zero").tolist() == [0.0, 0.0]


def test_missing_rewards() -> None:
    a = rewarded([1.0, math.nan, 0.0, 0.5], 4)
    close(a[[0, 2, 3]], rewarded([1.0, 0.0, 0.5], 3))
    assert a[1] == 0


def test_scales() -> None:
    batch = make_batch(1)
    centred = advantages(method("dr-grpo"), batch)
    std = batch.rewards.std()
    close(advantages(method("grpo", scale="batch"), batch), centred / (std + 1e-6))
    spread = per_row(centred, batch).std()
    close(advantages(method("grpo", scale="centred"), batch), centred / (spread + 1e-6))
    close(advantages(method("grpo", scale="none"), batch), centred)


def test_two_sided_cap() -> None:
    """INTELLECT-2's δ bounds the unclipped branch: a huge ratio with A < 0 loses its gradient."""
    batch = crafted([[math.log(5.0), math.log(3.0)]], [-1.0])
    free, capped = (policy_gradient(method("grpo", ratio_cap=cap), batch)[0] for cap in (None, 4.0))
    close(free, f64([2.5, 1.5]))
    close(capped, f64([0.0, 1.5]))


def test_stale_negative_responses_are_masked_with_the_count_kept() -> None:
    batch = crafted([[0.0, 0.0]] * 3, [-1.0, -1.0, 1.0])
    drift = f64([[0.9], [0.1], [0.9]])
    batch = batch.replace(rollout_logp=batch.logp + drift)
    found = policy_gradient(method("grpo", off_policy_threshold=0.5), batch)
    close(found, f64([[0.0], [1.0], [-1.0]]).expand(3, 2) / 6)


def test_process_rewards_sum_over_the_steps_ahead() -> None:
    batch = outcome_only(make_batch(1, groups=1, size=2, tokens=3)).replace(
        mask=torch.ones(2, 3, dtype=torch.bool),
        token_rewards=f64([[1.0, 0.0, 3.0], [0.0, 2.0, 0.0]]),
        step_end=torch.tensor([[True, False, True], [False, True, False]]),
    )
    a = advantages(method("grpo", process=True, eps=0.0), batch)
    close(a, f64([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))


@pytest.mark.checks("grpo", "ratio_cap has TRL's delta: value and gradient below 1 + clip_high too")
@pytest.mark.parametrize("delta", [1.01, 1.05, 1.15, 1.3, 4.0])
def test_cap_below_the_clip_has_the_gradient_of_trl(delta: float) -> None:
    """L = -min(min(r, δ)·A, clip(r, 1-ε, 1+ε)·A) through autograd, over a grid of ratios."""
    ratios = torch.linspace(0.5, 1.6, 221, dtype=torch.float64) + 0.0012  # off every bound
    ratios = torch.cat([ratios, f64([0.8999999, 1.1500001, 5.0])])
    for sign in (1.0, -1.0):
        batch = crafted(ratios.log()[None].tolist(), [[sign] * len(ratios)])
        made = make_recipe("dapo", {"clip_low": 0.1, "clip_high": 0.15, "dual": None})
        made = made.replace(trust=ppo_clip(clip_low=0.1, clip_high=0.15, cap=delta))
        logp = batch.logp.clone().requires_grad_()
        r = (logp - batch.old_logp).exp()
        theirs = -torch.min(sign * r.clamp(max=delta), sign * r.clamp(0.9, 1.15)).mean()
        found = loss_fn(made)(batch.replace(logp=logp))
        close(found.value, theirs)
        (expected,) = torch.autograd.grad(theirs, logp)
        (gradient,) = torch.autograd.grad(found.value, logp)
        close(gradient, expected)
        inside = (ratios > min(delta, 1.15)) & (ratios < 1.15)
        assert (gradient[0, inside] != 0).all() if sign < 0 else (gradient[0, inside] == 0).all()
        close(found.metrics["trust/clipped"], silent_share(ratios, sign, delta))


def silent_share(ratios: torch.Tensor, sign: float, delta: float) -> torch.Tensor:
    """Share of tokens for which the bound of the clip, a constant, is the larger loss."""
    free, bound = -sign * ratios.clamp(max=delta), -sign * ratios.clamp(0.9, 1.15)
    return ((bound > free) & ((ratios < 0.9) | (ratios > 1.15))).double().mean()


@pytest.mark.checks(
    "grpo", "a dual ceiling below 1 + clip_high ends the gradient there, as in verl"
)
def test_dual_below_the_clip() -> None:
    ratios = torch.linspace(0.5, 1.6, 111, dtype=torch.float64)
    batch = crafted(ratios.log()[None].tolist(), [[-1.0] * len(ratios)])
    logp = batch.logp.clone().requires_grad_()
    made = make_recipe("dapo", {"clip_low": 0.2, "clip_high": 0.2, "dual": 1.105})
    loss = loss_fn(made)(batch.replace(logp=logp)).value
    r = (logp - batch.old_logp).exp()
    theirs = torch.min(torch.max(r, r.clamp(0.8, 1.2)), torch.full_like(r, 1.105)).mean()
    close(loss, theirs)
    close(*(torch.autograd.grad(x, logp)[0] for x in (loss, theirs)))
