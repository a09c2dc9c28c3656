import math

import pytest
import torch
from helpers import advantages, close, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    k3,
    number,
    plus,
    ratio,
    sample_size,
    token_mean,
    tokens,
    weighted_score,
    z_scores,
)
from proxpo import Batch
from proxpo.ops.kl import kl_estimate
from proxpo.stages.trust import ess


def p4o(b: Batch) -> torch.Tensor:
    r_b, r_p, a = ratio(b), ratio(b, b.prox_logp), z_scores(b, eps=1e-8)
    e_b, e_p = sample_size(r_b), sample_size(r_p)
    e, w_b, w_p = min(e_b, e_p), 1 - e_b, 1 - e_p
    x = weighted_score({k: min(number(v), e) for k, v in r_b.items()}, a, b)
    mix = b.old_logp.clone()
    for i, t in tokens(b):
        both = w_b * math.exp(b.old_logp[i, t]) + w_p * math.exp(b.prox_logp[i, t])
        mix[i, t] = math.log(both / (w_b + w_p))
    return token_mean(plus(x, (1 - e, k3(b, mix))), b)


CASES = {
    "p4o": Case("p4o", {}, p4o),
}


@pytest.mark.checks("p4o", "prox = logp: equal to P3O (to 1e-8, from the constant in ESS)")
def test_first_step_of_an_epoch() -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method("p4o"), batch.replace(prox_logp=batch.logp))
    expected = loss_and_gradients(method("p3o"), batch)
    close(found[0], expected[0], rtol=1e-8)
    close(found[1], expected[1], rtol=1e-6, atol=1e-9)


@pytest.mark.checks("p4o", "prox = old: equal to P3O")
def test_one_anchor() -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method("p4o"), batch.replace(prox_logp=batch.old_logp))
    expected = loss_and_gradients(method("p3o"), batch)
    close(found[0], expected[0])
    close(found[1], expected[1])


def anchors(batch: object) -> tuple[torch.Tensor, torch.Tensor]:
    pair = (batch.old_logp, batch.prox_logp)
    return tuple(ess((batch.logp - other).exp(), batch.mask) for other in pair)


@pytest.mark.checks("p4o", "π_mix lies between the anchors and its weights sum to 1")
def test_mixture() -> None:
    batch = make_batch(1).replace(advantages=torch.zeros(9).double())
    found = policy_gradient(method("p4o"), batch) * batch.mask.double().sum()
    e_b, e_p = anchors(batch)
    strength = 1 - torch.minimum(e_b, e_p)
    mix = (1 - found / strength) * batch.logp.exp()  # from the gradient (1-ESS)(1 - π_mix/π)
    behaviour, proximal = batch.old_logp.exp(), batch.prox_logp.exp()
    low, high = torch.minimum(behaviour, proximal), torch.maximum(behaviour, proximal)
    inside = (mix >= low - 1e-12) & (mix <= high + 1e-12)
    assert inside[batch.mask].all()
    share = (1 - e_b) / (2 - e_b - e_p)
    close(mix[batch.mask], (share * behaviour + (1 - share) * proximal)[batch.mask])


@pytest.mark.checks("p4o", "logp = old = prox: gradient -A/n and no pull")
def test_fresh_data() -> None:
    batch = make_batch(1)
    batch = batch.replace(old_logp=batch.logp, prox_logp=batch.logp)
    expected = -advantages(method("p4o"), batch) / batch.mask.double().sum()
    close(policy_gradient(method("p4o"), batch), expected, rtol=1e-7)


@pytest.mark.checks("p4o", "swapping the anchors keeps ESS and π_mix but changes the weight")
def test_swap() -> None:
    batch = make_batch(1)
    swapped = batch.replace(old_logp=batch.prox_logp, prox_logp=batch.old_logp)
    still = {"advantages": torch.zeros(9).double()}
    made = method("p4o")
    close(
        policy_gradient(made, batch.replace(**still)),
        policy_gradient(made, swapped.replace(**still)),
    )
    assert not torch.allclose(policy_gradient(made, batch), policy_gradient(made, swapped))


def test_cap_is_the_worse_of_two() -> None:
    batch = make_batch(1)
    e_b, e_p = anchors(batch)
    metrics = proxpo.loss_fn(method("p4o"))(batch).metrics
    close(metrics["ratio/ess"], e_b)
    close(metrics["ratio/ess_prox"], e_p)
    found = policy_gradient(method("p4o", regularisers=None), batch)
    r = (batch.logp - batch.old_logp).exp()
    weight = torch.minimum(r, torch.minimum(e_b, e_p))
    expected = -weight * advantages(method("p4o"), batch) / batch.mask.double().sum()
    close(found, expected)
    assert kl_estimate(batch.logp, batch.old_logp).min() >= 0
