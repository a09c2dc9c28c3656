import math

import pytest
import torch
from helpers import (
    close,
    loss_and_gradients,
    make_batch,
    method,
    pad_columns,
    policy_gradient,
    with_leaves,
)

import proxpo
from methods._case import Case
from methods.loops import clipped, mean, number, ratio, tokens, z_scores
from proxpo import Batch


def entropy_top(b: Batch) -> torch.Tensor:
    x = clipped(ratio(b), z_scores(b), 0.2, 0.28)
    h = {(i, t): number(b.entropy[i, t]) for i, t in tokens(b)}
    chosen = sorted(h, key=h.get, reverse=True)[: max(1, math.ceil(0.2 * len(h) - 1e-9))]
    return mean([x[k] for k in chosen])


def entropy_quantile(b: Batch) -> torch.Tensor:
    x = clipped(ratio(b), z_scores(b), 0.2, 0.28)
    h = {(i, t): number(b.entropy[i, t]) for i, t in tokens(b)}
    bound = torch.quantile(torch.tensor(list(h.values()), dtype=torch.float64), 0.8)
    return sum(x[k] for k in x if h[k] >= bound) / len(x)


CASES = {
    "entropy-80-20": Case("entropy-80-20", {}, entropy_top),
    "entropy-80-20-trl": Case(
        "entropy-80-20", {"normalise": "all", "rule": "quantile"}, entropy_quantile
    ),
}


OPTIONS = {"prompts": None}


def selected(batch: object, **options: object) -> torch.Tensor:
    stage = method("entropy-80-20", **options).weights[0]
    ready = proxpo.prepare(method("dapo"), batch)
    return stage.apply(ready.batch, ready.ctx)[0]


@pytest.mark.checks("entropy-80-20", "ρ = 1 is DAPO; otherwise max(1, ⌈ρN⌉) tokens are chosen")
@pytest.mark.parametrize("share", [1e-9, 0.2, 0.5, 1.0])
def test_how_many(share: float) -> None:
    batch = make_batch(1)
    n = int(batch.mask.sum())
    assert (selected(batch, share=share) > 0).sum() == max(1, math.ceil(share * n - 1e-9))
    if share == 1.0:
        found, base = method("entropy-80-20", share=share), method("dapo")
        close(loss_and_gradients(found, batch)[1], loss_and_gradients(base, batch)[1])


@pytest.mark.parametrize("tokens", [5, 10, 15, 20, 35])
def test_round_shares_are_not_rounded_up(tokens: int) -> None:
    batch = make_batch(1, groups=1, size=1, tokens=tokens)
    batch = batch.replace(mask=torch.ones_like(batch.mask))
    assert (selected(batch) > 0).sum() == tokens // 5


@pytest.mark.checks("entropy-80-20", "chosen: DAPO's gradient times N/K; the others exactly 0")
def test_divides_by_the_selected() -> None:
    batch = make_batch(1)
    base = policy_gradient(method("dapo"), batch)
    chosen = selected(batch) > 0
    n, k = batch.mask.double().sum(), chosen.double().sum()
    found = policy_gradient(method("entropy-80-20"), batch)
    close(found, torch.where(chosen, base * n / k, 0.0))
    by_all = policy_gradient(method("entropy-80-20", normalise="all"), batch)
    close(by_all, found * k / n)  # TRL's divisor, smaller by about ρ
    assert not torch.allclose(by_all, found)


@pytest.mark.checks("entropy-80-20", "padding and increasing transforms of H leave the choice")
@pytest.mark.parametrize("rule", ["top_k", "quantile"])
def test_choice_depends_on_the_order_alone(rule: str) -> None:
    batch = make_batch(1)
    chosen = selected(batch, rule=rule)
    wide = selected(pad_columns(batch, 3, garbage=99.0), rule=rule)
    assert torch.equal(wide[:, :6], chosen)
    assert wide[:, 6:].eq(0).all()
    if rule == "top_k":  # an interpolated quantile moves with the values
        curved = batch.replace(entropy=batch.entropy.exp() - 7)
        assert torch.equal(selected(curved), chosen)


@pytest.mark.checks("entropy-80-20", "normalise=all: the top and the bottom part add up to DAPO")
def test_parts_add_up() -> None:
    batch = make_batch(1)
    base = policy_gradient(method("dapo"), batch)
    top = policy_gradient(method("entropy-80-20", normalise="all"), batch)
    bottom = torch.where(selected(batch) > 0, 0.0, base)
    close(top + bottom, base)


@pytest.mark.checks("entropy-80-20", "no gradient flows through the entropies")
def test_entropy_is_detached() -> None:
    batch = with_leaves(make_batch(1))
    value = proxpo.loss_fn(method("entropy-80-20"))(batch).value
    assert torch.autograd.grad(value, batch.entropy, allow_unused=True)[0] is None


def test_kl_stays_on_all_tokens() -> None:
    batch = make_batch(1)
    settings = {"regularisers": "kl_to_ref", "regularisers.kl_to_ref.coef": 0.5}
    with_kl = policy_gradient(method("entropy-80-20", **settings), batch)
    part = with_kl - policy_gradient(method("entropy-80-20"), batch)
    expected = 0.5 * (1 - (batch.ref_logp - batch.logp).exp()) * batch.mask
    close(part, expected / batch.mask.double().sum())
