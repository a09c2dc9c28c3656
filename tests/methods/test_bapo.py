import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import close, crafted, f64, make_batch, method, on_policy, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Bounds,
    Numbers,
    bounded,
    clipped_between,
    number,
    ratio,
    token_mean,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.trust import balanced_clip
from proxpo.stages.trust.balanced import _bounds, _sums
from proxpo.types import Context


def positive_and_negative(b: Batch, a: Numbers, low: float, high: float) -> tuple[float, float]:
    r = ratio(b)
    p = sum(min(number(r[k]), high) * a[k] for k in r if a[k] > 0)
    n = sum(max(number(r[k]), low) * -a[k] for k in r if a[k] < 0)
    return p, n


def searched_official(b: Batch, a: Numbers, target: float) -> Bounds:
    low, high = 0.6, 1.2

    def met() -> bool:
        p, n = positive_and_negative(b, a, low, high)
        return n <= 0 or p / (n + 1e-8) >= target

    while not met() and low < 0.8 - 1e-9:
        low = min(low + 0.05, 0.8)
    while not met() and high < 2.0 - 1e-9:
        high = min(high + 0.05, 2.0)
    return low, high


def share_paper(b: Batch, a: Numbers, low: float, high: float) -> float:
    r, above, total = ratio(b), 0.0, 0.0
    for k in r:
        v = number(r[k])
        s = math.exp(number(b.rollout_logp[k])) * abs(min(v * a[k], bounded(v, low, high) * a[k]))
        above, total = above + (s if a[k] > 0 else 0.0), total + s
    return above / total if total > above else 1.0


def share_gradient(b: Batch, a: Numbers, low: float, high: float) -> float:
    r, above, below = ratio(b), 0.0, 0.0
    for k in r:
        v = number(r[k])
        if a[k] > 0 and v < high:
            above += v * a[k]
        if a[k] < 0 and v > low:
            below += v * -a[k]
    return above / (above + below) if below else 1.0


def searched_paper(
    b: Batch, a: Numbers, share: Callable[..., float], target: float, start: Bounds, end: Bounds
) -> Bounds:
    (low, high), tiny = start, 1e-9
    while share(b, a, low, high) < target and low + 0.05 <= end[0] + tiny:
        if high + 0.1 <= end[1] + tiny:
            high += 0.1
        else:
            low += 0.05
    return low, high


def bapo(b: Batch, search: Callable[[Batch, Numbers], Bounds], *, dual: float = math.inf) -> Any:
    a = z_scores(b)
    bounds = search(b, a)
    return token_mean(clipped_between(ratio(b), a, lambda k: bounds, dual=dual), b)


CASES = {
    "bapo": Case(
        "bapo",
        {"target": 1.45, "dual": 1.1},
        lambda b: bapo(b, lambda b, a: searched_official(b, a, 1.45), dual=1.1),
    ),
    "bapo-paper": Case(
        "bapo",
        {"statistic": "paper", "target": 0.53, "low_from": 0.8, "high_from": 1.01},
        lambda b: bapo(
            b, lambda b, a: searched_paper(b, a, share_paper, 0.53, (0.8, 1.01), (0.9, 3.0))
        ),
    ),
    "bapo-gradient": Case(
        "bapo",
        {"statistic": "gradient", "target": 0.5, "low_from": 0.7, "low_to": 1.0, "high_from": 1.0},
        lambda b: bapo(
            b, lambda b, a: searched_paper(b, a, share_gradient, 0.5, (0.7, 1.0), (1.0, 3.0))
        ),
    ),
}


SLUG = "bapo"
STATISTICS = ("official", "paper", "gradient")


def bounds(batch: Batch, **options: object) -> tuple[float, float]:
    return bounds_of(proxpo.loss_fn(method(SLUG, **options))(batch).metrics)


def bounds_of(seen: dict[str, torch.Tensor]) -> tuple[float, float]:
    return round(float(seen["trust/low"]), 9), round(float(seen["trust/high"]), 9)


def searched(batch: Batch, targets: torch.Tensor, **options: object) -> list[tuple[float, float]]:
    """The bounds for each target, from the stage alone: the batch has its advantages."""
    batch = batch.replace(advantages=batch.advantages[:, None].expand_as(batch.logp))
    ratio = (batch.logp - batch.old_logp).exp()
    stages = [balanced_clip(target=t, **options) for t in targets.tolist()]
    return [bounds_of(stage.apply(ratio, batch, Context())[1]) for stage in stages]


def unbalanced(**fields: object) -> Batch:
    """Many negative tokens near 1, few positive ones of which some are far above."""
    z = [[0.0, 0.6, 0.9, 0.05], [0.0, -0.3, -0.6, 0.1]]
    batch = crafted(z, [1.0, -1.4], **fields)
    return batch.replace(rollout_logp=batch.old_logp)


@pytest.mark.checks(SLUG, "target 0: the starting bounds, and PPO's clip with 0.8 and 1.2")
@pytest.mark.parametrize("statistic", STATISTICS)
def test_nothing_to_reach(statistic: str) -> None:
    batch = make_batch(1, spread=0.6)
    start = {"low_from": 0.8, "low_to": 0.8, "high_from": 1.2, "dual": None}
    made = method(SLUG, statistic=statistic, target=0.0, **start)
    plain = method("grpo", aggregate="token_mean")
    close(policy_gradient(made, batch), policy_gradient(plain, batch))
    assert bounds(batch, statistic=statistic, target=0.0) == (0.6, 1.2)


@pytest.mark.checks(SLUG, "on-policy the statistic ignores the bounds: they stay or run to the end")
@pytest.mark.parametrize("statistic", ["official", "paper"])
def test_on_policy(statistic: str) -> None:
    batch = on_policy(unbalanced())
    end = {"official": (0.8, 2.0), "paper": (0.9, 3.0)}[statistic]
    found = {bounds(batch, statistic=statistic, target=t) for t in (0.1, 0.3, 0.6, 0.9, 2.0)}
    assert found == {(0.6, 1.2), end}


@pytest.mark.checks(SLUG, "P does not fall with c_high, N does not fall with c_low")
def test_monotone_sums() -> None:
    batch = make_batch(1, spread=0.6)
    batch = batch.replace(advantages=torch.linspace(-1, 1, 9).double()[:, None].expand(9, 6))
    r = (batch.logp - batch.old_logp).exp()
    bounds = _bounds([0.5, 0.6, 0.8, 0.95], [1.0, 1.1, 1.5, 3.0], r.dtype, r.device)
    push, pull = _sums(r, batch, bounds, "official")
    assert (push.diff() > 0).all()
    assert (pull.diff() > 0).all()
    a, m = batch.advantages, batch.mask
    close(push[1], (torch.where(m & (a > 0), a, 0.0) * r.clamp(max=1.1)).sum())
    close(pull[2], (torch.where(m & (a < 0), -a, 0.0) * r.clamp(min=0.8)).sum())
    live, _ = _sums(r, batch, bounds, "gradient")
    close(live[1], (torch.where(m & (a > 0) & (r < 1.1), a, 0.0) * r).sum())


@pytest.mark.checks(SLUG, "official: c_low runs to its end before c_high moves")
def test_official_order() -> None:
    batch = unbalanced()
    found = searched(batch, torch.linspace(0.5, 1.3, 25))
    assert set(found) >= {(0.6, 1.2), (0.8, 2.0)}
    assert all(low == 0.8 or high == 1.2 for low, high in found)
    assert any(low == 0.8 and 1.2 < high < 2.0 for low, high in found)


@pytest.mark.checks(SLUG, "raising c_low never helps the published statistics; 'gradient' it does")
def test_c_low_moves_away_from_the_target() -> None:
    batch = unbalanced()
    official = searched(batch, torch.linspace(0.5, 1.0, 11))
    assert {low for low, _ in official} == {0.6, 0.8}
    paper = searched(batch, torch.linspace(0.3, 0.6, 30), statistic="paper")
    assert {low for low, _ in paper} == {0.6, 0.9}
    narrow = {"statistic": "gradient", "high_to": 1.2, "low_from": 0.5, "low_to": 1.0}
    stops = searched(batch, torch.linspace(0.2, 0.6, 60), **narrow)
    assert {low for low, _ in stops} - {0.5, 1.0}


@pytest.mark.checks(SLUG, "paper: c_high moves first")
def test_paper_order() -> None:
    batch = unbalanced()
    found = searched(batch, torch.linspace(0.3, 0.6, 30), statistic="paper")
    assert any(low == 0.6 and 1.2 < high < 3.0 for low, high in found)
    assert all(low == 0.6 or high == 3.0 for low, high in found)


@pytest.mark.checks(SLUG, "the bounds never leave their range")
@pytest.mark.parametrize("statistic", STATISTICS)
def test_range(statistic: str) -> None:
    for seed in range(4):
        batch = make_batch(seed, spread=0.6)
        low, high = bounds(batch, statistic=statistic, low_step=0.07, high_step=0.3, target=9.0)
        assert 0.6 <= low <= (0.8 if statistic == "official" else 0.9)
        assert 1.2 <= high <= (2.0 if statistic == "official" else 3.0)


def test_only_the_official_search_truncates_its_last_step() -> None:
    batch = make_batch(1, spread=0.6)
    steps = {"low_step": 0.15, "high_step": 0.5, "target": 99.0}
    assert bounds(batch, **steps) == (0.8, 2.0)
    assert bounds(batch, statistic="paper", **steps) == (0.9, 2.7)


@pytest.mark.checks(SLUG, "gradient -A·r/n on live tokens, 0 on clipped ones")
def test_gradient() -> None:
    batch = crafted([[0.0, 0.3], [-0.3, -0.9]], [1.0, -1.0])
    made = method(SLUG, target=0.0, dual=None)
    r = (batch.logp - batch.old_logp).exp()
    close(policy_gradient(made, batch), f64([[-1.0, 0.0], [1.0, 0.0]]) * r / 4)


@pytest.mark.checks(SLUG, "scaling all advantages leaves the bounds unchanged")
@pytest.mark.parametrize("statistic", STATISTICS)
def test_scale_of_advantages(statistic: str) -> None:
    batch = unbalanced()
    scaled = batch.replace(advantages=1000 * batch.advantages)
    for target in (0.35, 0.42, 0.8, 0.9):
        options = {"statistic": statistic, "target": target}
        assert bounds(batch, **options) == bounds(scaled, **options)


@pytest.mark.checks(SLUG, "no negative tokens, or all A = 0: start; no positive ones: the end")
@pytest.mark.parametrize(("sign", "end"), [(1.0, False), (0.0, False), (-1.0, True)])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_one_sided_batches(sign: float, end: bool, statistic: str) -> None:
    batch = crafted([[0.1, 0.5], [-0.2, 0.0]], [sign, sign])
    batch = batch.replace(rollout_logp=batch.old_logp)
    stops = (0.8, 2.0) if statistic == "official" else (0.9, 3.0)
    assert bounds(batch, statistic=statistic) == (stops if end else (0.6, 1.2))


def test_paper_weighs_by_the_sampler() -> None:
    batch = unbalanced()
    doubled = batch.replace(
        rollout_logp=batch.rollout_logp + torch.where(batch.advantages[:, None] > 0, 0.3, 0.0)
    )
    options = {"statistic": "paper", "target": 0.5}
    assert bounds(batch, **options) != bounds(doubled, **options)
    assert bounds(batch, target=0.9) == bounds(doubled, target=0.9)


def test_microbatch_scope_searches_in_each_part() -> None:
    batch = make_batch(1, spread=0.6)
    whole, parts = (method(SLUG, target=0.9, scope=s) for s in ("batch", "microbatch"))
    found = {}
    for name, made in (("whole", whole), ("parts", parts)):
        ready = proxpo.prepare(made, batch)
        pieces = [ready.batch.rows(torch.tensor(r)) for r in ([0, 1, 2, 3], [4, 5, 6, 7, 8])]

        def loss(part: Batch, all_sum: object, made: object = made, ready: object = ready):
            return proxpo.policy_loss(made, part, replace(ready.ctx, all_sum=all_sum)).metrics[
                "trust/high"
            ]

        all_sum = proxpo.over_microbatches(loss, pieces)
        found[name] = {float(loss(piece, all_sum=all_sum)) for piece in pieces}
    assert len(found["whole"]) == 1
    assert len(found["parts"]) == 2


def test_defaults_of_each_statistic() -> None:
    assert method(SLUG).trust.options["dual"] == 3.0
    assert method(SLUG, statistic="paper").trust.options["dual"] is None
    assert method(SLUG, statistic="paper", dual=2.0).trust.options["dual"] == 2.0


@pytest.mark.parametrize(
    "option",
    [
        {"low_step": 0.0},
        {"high_to": math.inf},
        {"high_from": 0.5},
        {"low_from": -0.1},
        {"low_from": 0.9},
        {"high_step": 1e-9},
        {"dual": 0.5},
    ],
)
def test_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="balanced_clip"):
        method(SLUG, **option)
