import math

import pytest
import torch
from helpers import close, loss_and_gradients, make_batch, method, pad_columns, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import Numbers, clipped, k3, number, ratio, times, token_mean, tokens, z_scores
from proxpo import Batch


def quantile(values: list[float], q: float) -> float:
    ordered, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def earl(b: Batch, *, share: float, per: str = "response", gated: bool = False, kl_coef: float = 0):
    h = {k: number(b.entropy[k]) for k in tokens(b)}
    gate: Numbers = {}
    for k in h:
        pool = [v for (i, _), v in h.items() if per == "batch" or i == k[0]]
        gate[k] = float(h[k] >= quantile(pool, 1 - share) - 1e-12)
    x = times(clipped(ratio(b), z_scores(b), 0.2, 0.2), gate)
    n = sum(gate.values()) if gated else len(h)
    return sum(x.values()) / n + kl_coef * token_mean(k3(b, b.ref_logp), b)


CASES = {
    "earl": Case("earl", {}, lambda b: earl(b, share=0.2)),
    "earl-gated": Case(
        "earl",
        {"normalise": "gated", "share": 0.5, "kl_coef": 0.1},
        lambda b: earl(b, share=0.5, gated=True, kl_coef=0.1),
    ),
    "earl-batch": Case(
        "earl", {"level": "batch", "share": 0.4}, lambda b: earl(b, share=0.4, per="batch")
    ),
    "earl-batch-gated": Case(
        "earl",
        {"level": "batch", "share": 0.4, "normalise": "gated"},
        lambda b: earl(b, share=0.4, per="batch", gated=True),
    ),
}


SLUG = "earl"
BASE = {"aggregate": "token_mean"}


def gates(batch: Batch, **options: object) -> torch.Tensor:
    return proxpo.prepare(method(SLUG, **options), batch).batch.gate


@pytest.mark.checks(SLUG, "ρ = 1 and β = 0 is the ungated base method")
@pytest.mark.parametrize("options", [{}, {"normalise": "gated"}, {"level": "batch"}])
def test_all_tokens(options: dict) -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method(SLUG, share=1.0, **options), batch)
    for ours, base in zip(found, loss_and_gradients(method("grpo", **BASE), batch)):
        close(ours, base)


@pytest.mark.checks(SLUG, "gradient 0 below the threshold of the response, unchanged above it")
def test_gradient() -> None:
    batch = make_batch(1)
    gate = gates(batch)
    base = policy_gradient(method("grpo", **BASE), batch)
    found = policy_gradient(method(SLUG), batch)
    close(found, torch.where(gate, base, 0.0), atol=0.0)
    n = batch.mask.double().sum() / gate.double().sum()
    close(policy_gradient(method(SLUG, normalise="gated"), batch), n * found)


@pytest.mark.checks(SLUG, "1 + ⌊(L - 1)ρ⌋ tokens of a response pass, at least one")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75])
def test_how_many(share: float) -> None:
    batch = make_batch(2, tokens=9)
    length = batch.mask.sum(1)
    expected = [1 + math.floor((int(n) - 1) * share + 1e-9) for n in length]
    assert gates(batch, share=share).sum(1).tolist() == expected


def test_equal_entropies_all_pass_and_empty_responses_do_not() -> None:
    batch = make_batch(1)
    empty = batch.mask.clone()
    empty[2] = False
    even = batch.replace(entropy=torch.ones_like(batch.entropy), mask=empty)
    assert torch.equal(gates(even), empty)


@pytest.mark.checks(SLUG, "one response's entropies times 10: no gate moves; with level=batch some")
def test_level() -> None:
    batch = make_batch(1)
    factor = torch.where(torch.arange(9) == 3, 10.0, 1.0)[:, None]
    louder = batch.replace(entropy=factor * batch.entropy)
    assert torch.equal(gates(louder), gates(batch))
    quiet, loud = (
        policy_gradient(method(SLUG, level="batch"), one).ne(0) for one in (batch, louder)
    )
    assert not torch.equal(quiet, loud)


@pytest.mark.checks(SLUG, "the gate depends on entropies alone")
def test_gate_ignores_everything_else() -> None:
    batch = make_batch(1)
    other = batch.replace(
        rewards=batch.rewards.flip(0), old_logp=batch.old_logp - 1, logp=2 * batch.logp
    )
    assert torch.equal(gates(other), gates(batch))
    wide = gates(pad_columns(batch, 3, garbage=99.0))
    assert torch.equal(wide[:, :6], gates(batch))
    assert not wide[:, 6:].any()


def test_gate_is_found_once_per_rollout() -> None:
    """Later updates bring new entropies; the gate stays."""
    made, batch = method(SLUG), make_batch(1)
    ready = proxpo.prepare(made, batch)
    later = ready.batch.replace(entropy=-batch.entropy)
    first, second = (proxpo.policy_loss(made, one, ready.ctx).value for one in (ready.batch, later))
    close(first, second, rtol=0, atol=0)


def test_kl_stays_on_all_tokens() -> None:
    batch = make_batch(1)
    part = policy_gradient(method(SLUG, kl_coef=0.5), batch) - policy_gradient(method(SLUG), batch)
    expected = 0.5 * (1 - (batch.ref_logp - batch.logp).exp()) * batch.mask
    close(part, expected / batch.mask.sum())


def test_refused() -> None:
    with pytest.raises(ValueError, match="share must be in"):
        method(SLUG, share=1.5)
    with pytest.raises(ValueError, match="'entropy' \\(entropy of the next-token"):
        proxpo.prepare(method(SLUG), make_batch(1).replace(entropy=None))
