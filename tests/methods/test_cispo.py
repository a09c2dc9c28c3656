import math

import pytest
import torch
from helpers import (
    advantages,
    close,
    crafted,
    loss_and_gradients,
    make_batch,
    method,
    on_policy,
    policy_gradient,
)

from methods._case import Case
from methods.loops import Terms, bounded, number, ratio, token_mean, weighted_score, z_scores
from proxpo import Batch


def cispo(b: Batch, low: float, high: float) -> Terms:
    w = {k: bounded(number(v), low, high) for k, v in ratio(b).items()}
    return weighted_score(w, z_scores(b), b)


def cispo_unified(b: Batch) -> torch.Tensor:
    x, a, r = cispo(b, 0.9, 1.2), z_scores(b), ratio(b)
    silent = {k: (a[k] > 0 and r[k] > 1.1) or (a[k] < 0 and r[k] < 0.8) for k in x}
    return token_mean({k: 0.0 * x[k] if silent[k] else x[k] for k in x}, b)


CASES = {
    "cispo": Case("cispo", {}, lambda b: token_mean(cispo(b, 0.0, 1.2), b)),
    "cispo-trl": Case(
        "cispo", {"absolute": True, "clip_high": 1.1}, lambda b: token_mean(cispo(b, 0.0, 1.1), b)
    ),
    "cispo-unified": Case(
        "cispo", {"clip_low": 0.1, "mask_low": 0.2, "mask_high": 0.1}, cispo_unified
    ),
}


@pytest.mark.checks("cispo", "dloss/dlogp = -clip(r)·A/N for every token, never 0 unless A = 0")
def test_no_token_is_silenced() -> None:
    batch = crafted([[-3.0, 0.0, 0.1, 2.0], [-3.0, 0.0, 0.1, 2.0]], [1.0, -1.0])
    r = (batch.logp - batch.old_logp).exp()
    found = policy_gradient(method("cispo"), batch)
    close(found, -r.clamp(max=1.2) * batch.advantages[:, None] / 8)
    assert found.ne(0).all()
    assert policy_gradient(method("ppo"), batch)[0, 3] == 0


@pytest.mark.checks("cispo", "all ratios in the band: the gradient of unclipped -A·r and of PPO")
def test_inside_the_band() -> None:
    batch = make_batch(1, spread=0.03)
    same = {"advantage": "group_relative", "aggregate": "token_mean"}
    found = policy_gradient(method("cispo"), batch)
    close(found, policy_gradient(method("reinforce", form="ratio", **same), batch))
    close(found, policy_gradient(method("grpo", aggregate="token_mean"), batch))


@pytest.mark.checks("cispo", "r = 1: REINFORCE's gradient; the value moves with logp itself")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1))
    same = {"advantage": "group_relative", "aggregate": "token_mean"}
    close(
        policy_gradient(method("cispo"), batch), policy_gradient(method("reinforce", **same), batch)
    )
    batch = batch.replace(advantages=torch.ones(9).double())
    moved = batch.replace(logp=batch.logp - 1, old_logp=batch.old_logp - 1)
    values = [loss_and_gradients(method("cispo"), b)[0] for b in (batch, moved)]
    close(values[1] - values[0], 1.0)


@pytest.mark.checks("cispo", "ε = 0.2 of the paper is the cap 1.2 of TRL, not the cap 0.2")
def test_meaning_of_epsilon() -> None:
    batch = make_batch(1)
    paper = policy_gradient(method("cispo", clip_high=0.2), batch)
    close(policy_gradient(method("cispo", absolute=True, clip_high=1.2), batch), paper)
    confused = policy_gradient(method("cispo", absolute=True, clip_high=0.2), batch)
    assert not torch.allclose(confused, paper)


@pytest.mark.checks("cispo", "unified form: PPO's gradient without a cap, not with one (A < 0)")
def test_unified_form() -> None:
    batch = make_batch(1, spread=0.6)
    ppo = policy_gradient(method("grpo", aggregate="token_mean"), batch)
    masks = {"mask_low": 0.2, "mask_high": 0.2}
    close(policy_gradient(method("cispo", clip_high=math.inf, **masks), batch), ppo)
    capped = policy_gradient(method("cispo", clip_high=0.5, **masks), batch)
    r, a = (batch.logp - batch.old_logp).exp(), advantages(method("cispo"), batch)
    differs = ~torch.isclose(capped, ppo, rtol=1e-9, atol=0.0) & batch.mask
    assert differs.any()
    assert torch.equal(differs, batch.mask & (a < 0) & (r > 1.5))


def test_no_lower_bound_unless_asked() -> None:
    batch = crafted([[-2.0]], [1.0])
    close(policy_gradient(method("cispo"), batch), -math.exp(-2.0))
    close(policy_gradient(method("cispo", clip_low=0.2), batch), -0.8)
