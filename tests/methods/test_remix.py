from typing import Any

import pytest
import torch
from helpers import close, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import clipped_between, entropies, k3, number, plus, ratio, token_mean, z_scores
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch
from proxpo.stages.regularisers.convex import base_share
from proxpo.types import Clock


def remix(b: Batch, *, clip: float, kl_coef: float, lam: float, entropy_coef: float = 0.0) -> Any:
    r = ratio(b)
    c = {k: number(torch.exp(b.prox_logp[k] - b.old_logp[k])) for k in r}
    x = clipped_between(r, z_scores(b), lambda k: (c[k] - clip, c[k] + clip))
    anchors = (kl_coef * lam, k3(b, b.ref_logp)), (kl_coef * (1 - lam), k3(b, b.prev_logp))
    return token_mean(plus(x, *anchors, (-entropy_coef, entropies(b))), b)


CASES = {
    "remix": Case(
        "remix",
        {"clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.2},
        lambda b: remix(b, clip=0.1, kl_coef=0.2, lam=1.0),
    ),
    "remix-half": Case(
        "remix",
        {"base_share": 0.25, "kl_coef": 0.3, "entropy_coef": 0.02},
        lambda b: remix(b, clip=0.2, kl_coef=0.3, lam=0.25, entropy_coef=0.02),
    ),
}


SLUG = "remix"


@pytest.mark.checks(SLUG, "fresh data: c = 1, the loss of PPO's clip with ε")
def test_fresh_data() -> None:
    batch = make_batch(1)
    batch = batch.replace(prox_logp=batch.old_logp)
    plain = method("grpo", aggregate="token_mean", clip_low=0.1, clip_high=0.1)
    found = loss_and_gradients(method(SLUG, clip_low=0.1, clip_high=0.1, kl_coef=0.0), batch)
    expected = loss_and_gradients(plain, batch)
    close(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.checks(SLUG, "π = π_k: r = c, nothing is clipped, the gradient is -c·A")
def test_at_the_present_policy() -> None:
    batch = make_batch(3, spread=0.6)
    batch = batch.replace(logp=batch.prox_logp, advantages=torch.randn(9).double())
    c = (batch.prox_logp - batch.old_logp).exp()
    n = batch.mask.sum()
    expected = torch.where(batch.mask, -c * batch.advantages[:, None] / n, 0.0)
    close(policy_gradient(method(SLUG, clip_low=0.0, clip_high=0.0, kl_coef=0.0), batch), expected)


@pytest.mark.checks(SLUG, "λ is 1 up to t = 50, 0.9 for 51-60, 0.6 at 90, 0.5 from 91 on")
def test_share_of_the_base() -> None:
    times = {0: 1.0, 50: 1.0, 51: 0.9, 60: 0.9, 61: 0.8, 90: 0.6, 91: 0.5, 500: 0.5}
    for t, expected in times.items():
        assert base_share(t) == pytest.approx(expected)
    batch, made = make_batch(1), method(SLUG, kl_coef=0.3)
    late = proxpo.loss_fn(made)(batch, proxpo.Context(clock=Clock(updates=75))).value
    close(late, proxpo.loss_fn(method(SLUG, kl_coef=0.3, base_share=0.7))(batch).value)


@pytest.mark.checks(SLUG, "λ = 1: the base alone; λ = 0: the previous policy alone; β = 0: neither")
def test_anchors() -> None:
    batch = make_batch(1)
    other = batch.replace(prev_logp=batch.prev_logp - 1.0)
    base = batch.replace(ref_logp=batch.ref_logp - 1.0)

    def value(b: proxpo.Batch, **options: float) -> torch.Tensor:
        return proxpo.loss_fn(method(SLUG, **options))(b).value

    assert value(batch, base_share=1.0) == value(other, base_share=1.0)
    assert value(batch, base_share=1.0) != value(base, base_share=1.0)
    assert value(batch, base_share=0.0) == value(base, base_share=0.0)
    assert value(batch, base_share=0.0) != value(other, base_share=0.0)
    assert value(batch, kl_coef=0.0) == value(other, kl_coef=0.0) == value(base, kl_coef=0.0)


@pytest.mark.checks(SLUG, "p = 0, m = 1, λ = 1: GRPO with a KL to the reference")
def test_without_its_parts() -> None:
    batch = make_batch(1)
    batch = batch.replace(prox_logp=batch.old_logp)
    bare = method(SLUG, share=0.0, passes=1, base_share=1.0, kl_coef=0.1)
    plain = method("grpo", aggregate="token_mean", kl_coef=0.1)
    close(loss_and_gradients(bare, batch)[0], loss_and_gradients(plain, batch)[0])
    updates = ToyUpdates(recipe=bare)
    run(bare, updates)
    asked = [call for call in updates.calls if call[0] != "mix"]
    assert asked == [("keep", 0, 0), ("step", 1, None, False)]
    assert ("mix", 0.0, 2) in updates.calls


def test_reincarnation() -> None:
    """Mixing until step T; then the base is the policy of that moment and stays."""
    made = method(SLUG, reset_at=4)
    updates, state, names = ToyUpdates(lambda theta: theta, recipe=made, parts=2), None, []
    bases = []
    for t in (0, 4, 8):
        updates.calls, before = [], updates.theta
        state, seen = run(made, updates, state, updates=t)
        names.append([call[0] for call in updates.calls])
        assert updates.calls[-1] == ("step", 4, None, False)  # twice through two mini-batches
        close(state["previous.0"], before)
        bases.append((float(seen["schedule/reborn"]), state.get("base.0")))
    assert names == [["keep", "mix", "step"], ["step"], ["step"]]
    assert bases[0] == (0.0, None)
    close(bases[1][1], f64_power(0.9, 4))  # the weights before that step, after four of lr 0.1
    assert torch.equal(bases[1][1], bases[2][1])
    close(updates.added["ref_logp"], updates.rollout.logp + bases[1][1].sum())


def f64_power(factor: float, times: int) -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * factor**times
