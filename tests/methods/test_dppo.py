import math

import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, on_policy, policy_gradient

from methods._case import Case
from methods.loops import centred, everywhere, number, tokens, weighted_score
from proxpo import Batch


def dppo(
    b: Batch, *, kind: str = "tv", low: float, high: float, cap: float = math.inf, length: int
) -> torch.Tensor:
    a, weight = everywhere(centred(b), b), {}
    for k in tokens(b):
        new, old = math.exp(number(b.logp[k])), math.exp(number(b.old_logp[k]))
        d = abs(old - new)
        if kind == "kl":
            certain = min(old, 1.0)  # noise may have put it above
            d = certain * math.log(old / new)
            d += (1 - certain) * math.log((1 - certain + 1e-8) / (1 - new + 1e-8))
        away = d > high and new > old if a[k] > 0 else d > low and new < old
        weight[k] = 0.0 if away else min(new / old, cap)
    return sum(weighted_score(weight, a, b).values()) / length / len(b.mask)


TIGHT = {"clip_low": 0.03, "clip_high": 0.05}
CASES = {
    "dppo": Case("dppo", {"max_tokens": 9}, lambda b: dppo(b, low=0.15, high=0.15, length=9)),
    "dppo-tight": Case(
        "dppo",
        {**TIGHT, "weight_cap": 1.1},
        lambda b: dppo(b, low=0.03, high=0.05, cap=1.1, length=3000),
    ),
    "dppo-kl": Case(
        "dppo",
        {"divergence": "kl", "clip_low": 0.005, "clip_high": 0.002},
        lambda b: dppo(b, kind="kl", low=0.005, high=0.002, length=3000),
    ),
}


def alive(new: list[float], old: list[float], sign: float, **options: object) -> list[bool]:
    """Which of these tokens, by their probabilities now and at sampling, still learn."""
    logp, old_logp = f64([new]).log(), f64([old]).log()
    batch = Batch(
        logp=logp, old_logp=old_logp, mask=torch.ones_like(logp, dtype=torch.bool),
        advantages=f64([sign]),
    )  # fmt: skip
    return (policy_gradient(method("dppo", **options), batch)[0] != 0).tolist()


@pytest.mark.checks("dppo", "fresh data: Dr. GRPO, -A/(B·L_max) per token")
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_fresh_data(divergence: str) -> None:
    batch = on_policy(make_batch(1))
    made = method("dppo", divergence=divergence, clip_low=0.0, clip_high=0.0)
    close(policy_gradient(made, batch), policy_gradient(method("dr-grpo"), batch))


@pytest.mark.checks(
    "dppo", "rare tokens move freely, likely ones are held: a clip does the reverse"
)
def test_probabilities_not_ratios() -> None:
    new, old = [0.03, 0.99], [0.01, 0.80]  # ratios 3 and 1.24
    assert alive(new, old, 1.0) == [True, False]
    assert alive(old, new, -1.0) == [True, False]
    clipped = method("dr-grpo", clip_low=0.25, clip_high=0.25)
    logp, old_logp = f64([new]).log(), f64([old]).log()
    mask = torch.ones_like(logp, dtype=torch.bool)
    batch = Batch(logp=logp, old_logp=old_logp, mask=mask, advantages=f64([1.0]))
    assert (policy_gradient(clipped, batch)[0] != 0).tolist() == [False, True]


@pytest.mark.checks("dppo", "a step back towards the sampler is never blocked")
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_steps_back_pass(divergence: str) -> None:
    far, near = [0.9, 0.1], [0.1, 0.9]
    assert alive(far, near, 1.0, divergence=divergence) == [False, True]
    assert alive(far, near, -1.0, divergence=divergence) == [True, False]


@pytest.mark.checks("dppo", "without a threshold: the importance-sampled policy gradient")
def test_no_threshold() -> None:
    batch = make_batch(1, spread=0.6)
    made = method("dppo", clip_low=math.inf, clip_high=math.inf, max_tokens=9)
    r = (batch.logp - batch.old_logp).exp()
    close(policy_gradient(made, batch), -advantages(made, batch) * r * batch.mask / (9 * 9))


def test_thresholds_follow_the_divergence() -> None:
    assert alive([0.64, 0.66], [0.5, 0.5], 1.0) == [True, False]  # tv: 0.14 and 0.16
    # KL of coins with 0.5 and 0.65: 0.047; with 0.5 and 0.67: 0.061
    assert alive([0.65, 0.67], [0.5, 0.5], 1.0, divergence="kl") == [True, False]


def test_the_anchor_of_the_ratio_is_that_of_the_distance() -> None:
    batch = make_batch(2, spread=0.6)
    swapped = batch.replace(old_logp=batch.rollout_logp)
    by_sampler = method("dppo", **TIGHT, **{"ratio.anchor": "rollout"})
    close(policy_gradient(by_sampler, batch), policy_gradient(method("dppo", **TIGHT), swapped))


def test_certain_tokens_give_finite_numbers() -> None:
    for divergence in ("tv", "kl"):
        assert alive([1.0, 1.0], [1.0, 0.5], -1.0, divergence=divergence) == [True, True]
