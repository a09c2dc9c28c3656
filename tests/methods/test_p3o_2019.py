import math

import pytest
import torch
from helpers import close, crafted, f64, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    entropies,
    full_kl,
    gae,
    k3,
    number,
    plus,
    score,
    token_mean,
    token_rewards,
    tokens,
    value_terms,
    weighted_score,
)
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch
from proxpo.errors import ProxpoError
from proxpo.stages.schedule import poisson_replay, variants
from proxpo.stages.trust import ess
from proxpo.types import Context


def p3o_2019(b: Batch, *, kl: str, cap: bool = True) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=0.99, lam=0.95)
    w = {(i, t): math.exp(number(b.logp[i, t])) / (math.exp(number(b.old_logp[i, t])) + 1e-7)
         for i, t in tokens(b)}  # fmt: skip
    total, squares = sum(w.values()), sum(v**2 for v in w.values())
    size = (total**2 / squares + 1e-7) / len(w)
    x = weighted_score({k: min(v, size if cap else 1.0) for k, v in w.items()}, raw, b)
    pull = k3(b, b.old_logp) if kl == "sampled" else full_kl(b, kl)
    return token_mean(plus(x, (1 - size, pull), (1.0, value_terms(b, raw))), b)


def p3o_2019_on(b: Batch) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=0.99, lam=0.95)
    x = plus(score(raw, b), (-0.01, entropies(b)), (1.0, value_terms(b, raw)))
    return token_mean(x, b)


CASES = {
    "p3o-2019": Case("p3o-2019", {}, lambda b: p3o_2019(b, kl="sampled")),
    "p3o-2019-on": Case("p3o-2019", {"step": "on"}, p3o_2019_on),
    "p3o-2019-full": Case(
        "p3o-2019", {"kl": "full", "cap": False}, lambda b: p3o_2019(b, kl="beta_pi", cap=False)
    ),
    "p3o-2019-code": Case(
        "p3o-2019",
        {"kl": "full", "kl_direction": "pi_beta", "kl_mean_over_actions": True},
        lambda b: p3o_2019(b, kl="pi_beta_mean"),
    ),
}


SLUG = "p3o-2019"


@pytest.mark.checks(SLUG, "β = π: ESS = 1, ρ = 1, λ = 0: the on-policy gradient")
def test_on_policy() -> None:
    batch = make_batch(1)
    batch = batch.replace(old_logp=batch.logp)
    off = policy_gradient(method(SLUG), batch)
    on = policy_gradient(method(SLUG, step="on"), batch)
    close(off, on, rtol=1e-5)  # β carries 1e-7 in the released code
    assert off.abs().max() > 1e-3  # the released guard would silence the policy term here


@pytest.mark.checks(SLUG, "one weight dominating N samples: ESS → 1/N, λ → 1 - 1/N")
def test_one_weight_dominates() -> None:
    ratio = f64([[1e8, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    close(ess(ratio, mask, eps=1e-7, eps_in="count"), 1 / 5, rtol=1e-6)


@pytest.mark.checks(SLUG, "scaling all weights keeps ESS but changes which of them are capped")
def test_scaling_moves_the_cap() -> None:
    batch = crafted([[0.3, -0.4, 0.1]], [0.0])
    made = method(SLUG)
    shifted = batch.replace(old_logp=batch.old_logp + 1.0)
    first, second = (proxpo.loss_fn(made)(b).metrics for b in (batch, shifted))
    close(first["ratio/ess"], second["ratio/ess"], rtol=1e-5)
    assert first["trust/clipped"] > second["trust/clipped"] == 0


@pytest.mark.checks(SLUG, "ρ carries no gradient: d policy/dlogp = -ρ·Â/N")
def test_weight_is_detached() -> None:
    batch = crafted([[0.8, -0.4, 0.1]], [[1.0, -2.0, 0.5]])
    made = method(SLUG, regularisers=None)
    r = batch.logp.exp() / (batch.old_logp.exp() + 1e-7)
    e = ess(r, batch.mask, eps=1e-7, eps_in="count")
    close(policy_gradient(made, batch), -torch.minimum(r, e) * batch.advantages / 3)
    uncapped = policy_gradient(method(SLUG, regularisers=None, cap=False), batch)
    close(uncapped, -r.clamp(max=1.0) * batch.advantages / 3)


@pytest.mark.checks(SLUG, "the |A|-averaged KL times |A| is the exact KL(π‖β)")
def test_full_kl() -> None:
    batch = make_batch(1).replace(advantages=torch.zeros(9).double(), values=None)
    code = {"kl": "full", "kl_direction": "pi_beta", "kl_mean_over_actions": True}
    averaged = loss_and_gradients(method(SLUG, **code), batch)[0]
    r = batch.logp.exp() / (batch.old_logp.exp() + 1e-7)
    weight = 1 - ess(r, batch.mask, eps=1e-7, eps_in="count")
    pi, beta = batch.vocab_logp, batch.old_vocab_logp
    exact = (pi.exp() * (pi - beta)).sum(-1)[batch.mask].mean()
    close(averaged * 4, weight * exact)
    paper = loss_and_gradients(method(SLUG, kl="full"), batch)[0]
    close(paper, weight * (beta.exp() * (beta - pi)).sum(-1)[batch.mask].mean())
    assert abs(paper - 4 * averaged) > 1e-3  # the two directions differ


def test_full_kl_of_impossible_tokens() -> None:
    batch = make_batch(1).replace(advantages=torch.zeros(9).double(), values=None)
    beta = batch.old_vocab_logp.clone()
    beta[..., 0] = -math.inf
    beta = beta.log_softmax(-1)
    value, grads = loss_and_gradients(method(SLUG, kl="full"), batch.replace(old_vocab_logp=beta))
    assert value.isfinite()
    assert grads["vocab_logp"].isfinite().all()


def test_on_policy_step_has_entropy_and_critic() -> None:
    batch = make_batch(1)
    _, grads = loss_and_gradients(method(SLUG, step="on"), batch)
    n = batch.mask.double().sum()
    close(grads["entropy"], -0.01 * batch.mask.double() / n)
    assert grads["values"].abs().max() > 0
    _, off = loss_and_gradients(method(SLUG), batch)
    close(off["entropy"], torch.zeros_like(batch.entropy))


def test_replayed_updates_are_poisson() -> None:
    schedule, updates = method(SLUG).schedule, ToyUpdates()
    ctx = Context(generator=torch.Generator().manual_seed(0))
    for _ in range(2000):
        schedule.apply(updates, ctx)
    names = [call[0] for call in updates.calls]
    assert names.count("step") == names.count("keep") == 2000
    assert names.count("replay") / 2000 == pytest.approx(2.0, abs=0.15)


def test_replay_follows_its_start_and_its_batch() -> None:
    updates = ToyUpdates()
    made = method(SLUG, **{"schedule.start": 100, "schedule.batch": 6, "schedule.capacity": 200})
    _, seen = run(made, updates)
    calls = [call for call in updates.calls if call[0] == "replay"]
    assert ("keep", 200, 0) in updates.calls
    assert calls
    assert set(calls) == {("replay", 100, 6.0)}
    assert seen["schedule/replayed"] == len(calls)
    for wrong in ({"start": 300}, {"start": -1}, {"batch": 0}, {"ratio": -1}, {"capacity": 0}):
        with pytest.raises(ProxpoError, match="poisson_replay: "):
            poisson_replay(**{"capacity": 200, **wrong})


@pytest.mark.checks(SLUG, "fresh data get the on-policy loss, replayed data the corrected one")
def test_fresh_data_have_a_loss_of_their_own() -> None:
    made, updates = method(SLUG, entropy_coef=0.3), ToyUpdates(recipe=method(SLUG))
    made.schedule.apply(updates, Context(generator=torch.Generator().manual_seed(0)))
    [fresh] = updates.variants
    on = method(SLUG, step="on", entropy_coef=0.3)
    parts = ("advantage", "ratio", "trust", "regularisers", "aggregate", "value")
    assert [getattr(fresh, part) for part in parts] == [getattr(on, part) for part in parts]
    assert "entropy" in made.needs()


def test_a_host_without_replay_can_follow_the_fresh_loss() -> None:
    assert variants(method(SLUG)) is None
    [fresh] = variants(method(SLUG, replay_ratio=0.0))
    assert fresh.trust.name == "score_function"
