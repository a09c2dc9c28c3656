import math
from typing import Any

import pytest
import torch
from helpers import close, gradients, make_batch, method, with_leaves

import proxpo
from methods._case import Case
from methods.loops import entropies, full_kl, plus, ratio, token_mean, unclipped, z_scores
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch
from proxpo.errors import ProxpoError
from proxpo.stages.regularisers import kl_dual
from proxpo.stages.regularisers.dual import divergence_from_old
from proxpo.stages.schedule.fixup import kl_alone
from proxpo.types import Context


def fixpo(b: Batch, *, beta: float, exact: bool = True, entropy_coef: float = 0.0) -> Any:
    r = ratio(b)
    kl = full_kl(b, "beta_pi") if exact else {k: x - 1 - torch.log(x) for k, x in r.items()}
    x = unclipped(r, z_scores(b))
    return token_mean(plus(x, (beta, kl), (-entropy_coef, entropies(b))), b)


CASES = {
    "fixpo": Case("fixpo", {"beta": 0.7}, lambda b: fixpo(b, beta=0.7)),
    "fixpo-sampled": Case(
        "fixpo",
        {"kl": "sampled", "entropy_coef": 0.01},
        lambda b: fixpo(b, beta=1.0, exact=False, entropy_coef=0.01),
    ),
}


SLUG = "fixpo"
METRIC = "kl/old_max"


def moved(*kls: float, **options) -> list[float]:
    """β after each dual step on these largest KLs."""
    stage, found = kl_dual(**options), []
    state = stage.init()
    for kl in kls:
        state = stage.step(make_batch(1), {METRIC: torch.tensor(kl)}, Context(state=state))
        found.append(float(state["coef"]))
    return found


@pytest.mark.checks(SLUG, "β: 1 -> 0.99 at KL = 0, 1 -> 1.01 where C·max KL > ε")
def test_first_dual_step() -> None:
    close(moved(0.0), [0.99], rtol=1e-6)
    close(moved(0.101), [1.01], rtol=1e-5)


@pytest.mark.checks(SLUG, "β is never negative; with ε → ∞ it goes to 0")
def test_multiplier_stays_positive() -> None:
    found = moved(*[0.0] * 150)
    assert found[-1] == 0.0
    assert min(found) == 0.0
    assert moved(*[100.0] * 150, radius=1e9)[-1] == 0.0


@pytest.mark.checks(SLUG, "π = π_old: the KL is 0 and so is its gradient")
def test_no_divergence_no_gradient() -> None:
    batch = make_batch(1)
    batch = with_leaves(batch.replace(vocab_logp=batch.old_vocab_logp))
    kl = divergence_from_old(batch, exact=True)
    close(kl, 0.0)
    logits = batch.old_vocab_logp.clone().requires_grad_()
    again = divergence_from_old(batch.replace(vocab_logp=logits.log_softmax(-1)), exact=True)
    close(torch.autograd.grad(again.sum(), logits)[0], 0.0)


@pytest.mark.checks(SLUG, "∂KL/∂logits = π - π_old")
def test_direction() -> None:
    batch, logits = make_batch(2), torch.randn(9, 6, 4, dtype=torch.float64, requires_grad=True)
    kl = divergence_from_old(batch.replace(vocab_logp=logits.log_softmax(-1)), exact=True)
    (found,) = torch.autograd.grad(kl.sum(), logits)
    close(found, logits.softmax(-1) - batch.old_vocab_logp.exp())


@pytest.mark.checks(SLUG, "the fix-up gradient is β·∇mean KL and knows no advantage")
def test_fixup_gradient() -> None:
    made = method(SLUG, beta=0.6)
    fix = kl_alone(made, made.regularisers[0])
    batch = make_batch(1)
    for scale in (1.0, -7.0):
        leaves = with_leaves(batch.replace(advantages=scale * torch.ones(9).double()))
        found = gradients(proxpo.loss_fn(fix)(leaves).value, leaves)
        kl = divergence_from_old(leaves, exact=True)[leaves.mask].mean()
        close(found["vocab_logp"], torch.autograd.grad(0.6 * kl, leaves.vocab_logp)[0])
        close(found["logp"], 0.0)


@pytest.mark.checks(SLUG, "ε → ∞: no fix-up step, the plain unclipped policy gradient")
def test_a_region_without_bounds() -> None:
    made = method(SLUG, radius=1e9, beta=0.0)
    updates = ToyUpdates(recipe=made, count=4, parts=2)
    _, seen = run(made, updates)
    assert seen["fixup/steps"] == 0
    assert [call for call in updates.calls if call[0] == "step"] == [("step", 1, None, False)] * 4
    plain = method("grpo", trust="unclipped", aggregate="token_mean", ratio="token")
    batch = make_batch(1)
    close(
        proxpo.loss_fn(method(SLUG, beta=0.0))(batch).value,
        proxpo.loss_fn(plain.replace(ratio=made.ratio))(batch).value,
    )


def test_failure_restores_the_last_weights_inside() -> None:
    """The toy's KL never falls, so the phase gives up, says so and takes the first weights back."""
    made = method(SLUG, radius=1e-6, max_fixup_passes=3, fixup_every="last")
    updates = ToyUpdates(lambda theta: theta, recipe=made, count=2)
    start = updates.theta
    _, seen = run(made, updates)
    assert (seen["fixup/reached"], seen["fixup/steps"], seen["fixup/passes"]) == (0.0, 3.0, 3.0)
    assert torch.equal(updates.theta, start)


def test_not_a_number_is_no_certificate() -> None:
    made = method(SLUG, max_fixup_passes=2)
    batch = make_batch(1)
    spoilt = batch.vocab_logp.clone()
    spoilt[0, 0] = math.nan
    updates = ToyUpdates(recipe=made, batch=batch.replace(vocab_logp=spoilt))
    assert run(made, updates)[1]["fixup/reached"] == 0


def test_fixup_needs_its_regulariser() -> None:
    made = method("grpo", schedule="fixup")
    with pytest.raises(ProxpoError, match=r"regularisers\+=kl_dual"):
        run(made, ToyUpdates(recipe=made))
