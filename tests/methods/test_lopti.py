import math

import pytest
import torch
from helpers import close, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import clipped, k3, plus, ratio, token_mean, z_scores
from methods.toy_updates import ToyUpdates
from proxpo import Batch
from proxpo.stages.schedule import variants


def lopti(b: Batch, *, alpha: float, kl_coef: float) -> torch.Tensor:
    a = {(i, t): (alpha * math.exp(b.old_logp[i, t]) + 1 - alpha) * v
         for (i, t), v in z_scores(b).items()}  # fmt: skip
    x = clipped(ratio(b), a, 0.2, 0.24, dual=10.0)
    return token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


CASES = {
    "lopti": Case("lopti", {}, lambda b: lopti(b, alpha=0.3, kl_coef=0.001)),
    "lopti-ar": Case(
        "lopti", {"variant": "ar", "kl_coef": 0.0}, lambda b: lopti(b, alpha=0.3, kl_coef=0.0)
    ),
}


GRPO = {"clip_high": 0.24, "dual": 10.0, "kl_coef": 0.001, "aggregate": "token_mean"}


def passes(batch: object, **options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = (loss_and_gradients(one, batch) for one in variants(method("lopti", **options)))
    return [(value, grads["logp"]) for value, grads in found]


@pytest.mark.checks("lopti", "α = 0 is the base method; α = 1 scales a token's gradient by p")
def test_limits_of_the_reweighting() -> None:
    batch = make_batch(1)
    base = policy_gradient(method("grpo", **GRPO), batch)
    close(policy_gradient(method("lopti", variant="ar", alpha=0.0), batch), base)
    plain = {**GRPO, "kl_coef": 0.0}
    scaled = policy_gradient(method("lopti", variant="ar", alpha=1.0, kl_coef=0.0), batch)
    close(scaled, policy_gradient(method("grpo", **plain), batch) * batch.old_logp.exp())


@pytest.mark.checks("lopti", "the weight lies in [1-α, 1]; no advantage changes its sign")
def test_range_of_the_weight() -> None:
    batch = make_batch(1)
    stage = method("lopti", variant="ar", alpha=0.3).weights[0]
    weight = stage.apply(batch.replace(old_logp=batch.old_logp.clamp(max=0)), proxpo.Context())[0]
    assert weight.min() >= 0.7
    assert weight.max() <= 1.0


@pytest.mark.checks("lopti", "losses and gradients of the two passes add up to the base method's")
@pytest.mark.parametrize("variant", ["lopti", "both"])
def test_passes_add_up(variant: str) -> None:
    batch = make_batch(1)
    (low, low_grad), (high, high_grad) = passes(batch, variant=variant)
    whole = loss_and_gradients(method("lopti", variant=variant), batch)
    close(low + high, whole[0])
    close(low_grad + high_grad, whole[1]["logp"])
    assert low_grad.abs().sum() > 0
    assert high_grad.abs().sum() > 0


@pytest.mark.checks("lopti", "η = 0: the first pass is empty; η > 1: the second")
def test_limits_of_the_threshold() -> None:
    batch = make_batch(1)
    whole = policy_gradient(method("lopti"), batch)
    nothing = torch.zeros_like(whole)
    for threshold, empty, full in ((0.0, 0, 1), (1.0, 1, 0)):
        found = passes(batch, threshold=threshold)
        close(found[empty][1], nothing, atol=0.0)
        close(found[full][1], whole)


@pytest.mark.checks("lopti", "the masks of the two passes are disjoint and cover every token")
@pytest.mark.parametrize("rule", ["probability", "quantile"])
def test_masks(rule: str) -> None:
    batch = make_batch(1)
    low, high = (
        one.select[0].apply(batch, proxpo.Context())[0]
        for one in variants(method("lopti", rule=rule))
    )
    close(low + high, torch.ones_like(low))
    p = batch.old_logp.exp()
    bound = 0.5 if rule == "probability" else p[batch.mask].quantile(0.5)
    assert torch.equal(low[batch.mask].bool(), p[batch.mask] < bound)


def test_denominator_counts_all_tokens() -> None:
    """Dividing a pass by its own tokens, the wrong variant, would make the passes heavier."""
    batch = make_batch(1)
    low, high = (
        one.select[0].apply(batch, proxpo.Context())[0].bool()
        for one in variants(method("lopti", variant="lopti"))
    )
    whole = policy_gradient(method("grpo", **GRPO), batch)
    (_, first), (_, second) = passes(batch, variant="lopti")
    close(first, torch.where(low, whole, 0.0))
    close(second, torch.where(high, whole, 0.0))


def test_kl_belongs_to_the_pass() -> None:
    batch = make_batch(1).replace(advantages=torch.zeros(9).double())
    (_, first), (_, second) = passes(batch)
    assert not (first.ne(0) & second.ne(0)).any()
    assert first.ne(0).any()


def test_order_of_the_passes() -> None:
    parts = [one.select[0].options["part"] for one in variants(method("lopti"))]
    assert parts == ["low", "high"]
    parts = [one.select[0].options["part"] for one in variants(method("lopti", high_first=True))]
    assert parts == ["high", "low"]
    assert method("lopti", variant="ar").schedule is None


def test_swaps_reach_the_passes() -> None:
    made = method("lopti", aggregate="token_sum", **{"trust.clip_high": 0.5})
    assert {one.aggregate.name for one in variants(made)} == {"token_sum"}
    assert {one.trust.options["clip_high"] for one in variants(made)} == {0.5}


def test_each_pass_gets_all_updates() -> None:
    made = method("lopti")
    updates = ToyUpdates(count=3, recipe=made)
    assert made.schedule.apply(updates, proxpo.Context()) == ({}, {})
    assert updates.calls == [("step", 3, None, False)] * 2
    assert updates.variants == list(variants(made))
