import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import close, f64, loss_and_gradients, make_batch, method, policy_gradient
from safetensors.torch import load_file, save_file

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    centred,
    clipped,
    everywhere,
    kept,
    mean,
    ratio,
    row,
    score,
    tokens,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.select.curvature import (
    Candidates,
    adam_step,
    candidates,
    gradient,
    sgd_shifts,
    shifts,
)
from proxpo.types import Clock, Context


def head_shifts(b: Batch, a: Numbers, i: int, t: int, *, k: int, rate: float) -> Any:
    """m_H and m_F of plain gradient steps, from dense matrices over candidates x units."""
    h, logits = b.hidden[i, t].tolist(), b.vocab_logp[i, t].tolist()
    top = sorted(range(len(logits)), key=lambda n: -logits[n])[:k]
    total = sum(math.exp(logits[n]) for n in top)
    pi = [math.exp(logits[n]) / total for n in top]
    v = [float(n == int(b.tokens[i, t])) - p for n, p in zip(top, pi)]
    step = [[a[i, t] * x * y for y in h] for x in v]
    inner = sum(x * x for line in step for x in line)  # <G, Δ> with Δ = G
    u = [sum(x * y for x, y in zip(line, h)) for line in step]
    along = sum(x * y for x, y in zip(v, u))
    fisher = sum(p * x * x for p, x in zip(pi, u)) - sum(p * x for p, x in zip(pi, u)) ** 2
    policy = rate**2 / 2 * along**2
    return rate * inner + rate**2 / 2 * a[i, t] * (along**2 - fisher), policy


def within(
    b: Batch, a: Numbers, bounds: tuple[float, float], *, one: bool = False, **how: Any
) -> Batch:
    """The batch without the tokens whose shifts are too large; its own check that some are."""

    def small(i: int, t: int) -> bool:
        objective, policy = head_shifts(b, a, i, t, **how)
        fits = objective >= 0 and objective < bounds[1] if one else abs(objective) < bounds[1]
        return policy < bounds[0] and fits

    return kept(b, small)


def capo(b: Batch, a: Numbers, rest: Batch) -> torch.Tensor:
    """A response divided by its kept tokens; one without any counts as 0 in the mean."""
    x = clipped(ratio(rest), a, 0.2, 0.2)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    return mean([mean([x[i, t] for t in row(rest, i)]) for i in rows])


def capo_grpo(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    return capo(b, a, within(b, a, (1e-4, 0.01), k=4, rate=0.05))


def capo_one_sided(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    return capo(b, a, within(b, a, (2e-3, 0.01), one=True, k=2, rate=0.4))


def capo_dr_grpo(b: Batch) -> torch.Tensor:
    a = everywhere(centred(b), b)
    rest = within(b, a, (1e-3, 5e-4), k=4, rate=0.02)
    x = clipped(ratio(rest), a, 0.2, 0.2)
    return (
        sum(x.values(), 0.0 * b.logp[0, 0]) / 9 / len([i for i in range(len(b.mask)) if row(b, i)])
    )


def capo_reinforce(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    rest = within(b, a, (1e-5, math.inf), k=4, rate=0.04)
    x = score({k: a[k] for k in tokens(rest)}, rest)
    return sum(x.values(), 0.0 * b.logp[0, 0]) / len([i for i in range(len(b.mask)) if row(b, i)])


CASES = {
    "capo": Case("capo", {"learning_rate": 0.05}, capo_grpo),
    "capo-one-sided": Case(
        "capo",
        {"optimizer": "sgd", "sides": "one", "k": 2, "learning_rate": 0.4, "tau_policy": 2e-3},
        capo_one_sided,
    ),
    "capo-dr-grpo": Case(
        "capo", {"host": "dr-grpo", "learning_rate": 0.02, "max_tokens": 9}, capo_dr_grpo
    ),
    "capo-reinforce": Case(
        "capo", {"host": "reinforce", "learning_rate": 0.04, "tau_objective": 0.0}, capo_reinforce
    ),
}


PLACE = "select.curvature_mask"


@pytest.fixture
def batch() -> Batch:
    """Prepared: with advantages."""
    return proxpo.prepare(method("capo"), make_batch(1)).batch


@pytest.fixture(name="tokens")
def candidate_tokens(batch: Batch) -> Candidates:
    return candidates(batch, k=4).at(batch.mask)


def kept_tokens(made: proxpo.Recipe, batch: Batch, **options: object) -> torch.Tensor:
    ready = proxpo.prepare(made, batch)
    return made.select[0].apply(ready.batch, replace(ready.ctx, **options))[0] > 0


@pytest.mark.checks("capo", "bounds of infinity, or of 0 (off): the host's loss exactly")
@pytest.mark.parametrize("host", ["grpo", "dr-grpo", "reinforce"])
def test_no_bounds(host: str) -> None:
    batch = make_batch(1)
    plain = method("capo", host=host).replace(select=())
    expected, expected_grads = loss_and_gradients(plain, batch)
    for bound in (0.0, math.inf):
        made = method("capo", host=host, tau_policy=bound, tau_objective=bound, learning_rate=9.0)
        value, grads = loss_and_gradients(made, batch)
        close(value, expected)
        close(grads, expected_grads)


@pytest.mark.checks("capo", "plain steps: m_F = (η²/2) A² |v|⁴ |h|⁴ and <G,Δ> = A² |v|² |h|²")
def test_closed_form(tokens: Candidates) -> None:
    a, v, h = tokens.advantage, tokens.pull.square().sum(-1), tokens.hidden.square().sum(-1)
    found = sgd_shifts(tokens, rate=0.3)
    close(found.policy, 0.3**2 / 2 * (a * v * h).square())
    g = gradient(tokens)
    close(g.square().sum((1, 2)), a.square() * v * h)
    u = (g @ tokens.hidden[..., None])[..., 0]
    close(u, (a * h)[:, None] * tokens.pull)
    for shift, expected in zip(found, shifts(tokens, u, rate=0.3), strict=True):
        close(shift, expected)


@pytest.mark.checks("capo", "m_H and m_F are dense Kronecker quadratic forms of the head")
def test_quadratic_forms(tokens: Candidates) -> None:
    rate = 0.3
    u = adam_step(tokens, moments(tokens), beta1=0.9, beta2=0.99, eps=1e-8)
    found = shifts(tokens, u, rate=rate)
    state = moments(tokens)
    for n in range(len(tokens.ids)):
        a, h, v, pi = (x[n] for x in (tokens.advantage, tokens.hidden, tokens.pull, tokens.share))
        g = a * torch.outer(v, h)
        d = rate * dense_adam(g, tokens.ids[n], state, 0.9, 0.99).flatten()
        outer_h, fisher = torch.outer(h, h), torch.diag(pi) - torch.outer(pi, pi)
        curvature = a * torch.kron(torch.outer(v, v) - fisher, outer_h)
        close(found.objective[n], g.flatten() @ d + d @ curvature @ d / 2)
        close(found.policy[n], d @ torch.kron(torch.outer(v, v), outer_h) @ d / 2)


def moments(tokens: Candidates) -> dict[str, torch.Tensor]:
    """Rows 0, 1 and 3 have been seen; 2 has not."""
    g = torch.Generator().manual_seed(3)
    dim = tokens.hidden.shape[1]
    first = torch.randn(3, dim, generator=g, dtype=torch.float64)
    second = torch.rand(3, dim, generator=g, dtype=torch.float64)
    return {"token_id": torch.tensor([0, 1, 3]), "first": first, "second": second, "steps": f64(4)}


def dense_adam(
    g: torch.Tensor, ids: torch.Tensor, state: dict, beta1: float, beta2: float
) -> torch.Tensor:
    """Adam's direction row by row, from the definition."""
    out, known, t = [], state["token_id"].tolist(), float(state["steps"]) + 1
    for slope, number in zip(g, ids.tolist()):
        at = known.index(number) if number in known else None
        m = torch.zeros_like(slope) if at is None else state["first"][at]
        q = torch.zeros_like(slope) if at is None else state["second"][at]
        m = beta1 * m + (1 - beta1) * slope
        q = beta2 * q + (1 - beta2) * slope**2
        out.append((m / (1 - beta1**t)) / ((q / (1 - beta2**t)).sqrt() + 1e-8))
    return torch.stack(out)


@pytest.mark.checks("capo", "gradients of kept tokens are the host's times n/n_kept per response")
def test_kept_gradients() -> None:
    batch, made = make_batch(1), method("capo", learning_rate=0.05)
    keep = kept_tokens(made, batch)
    assert 0 < keep.sum() < batch.mask.sum()
    found, plain = (policy_gradient(m, batch) for m in (made, made.replace(select=())))
    factor = batch.mask.sum(1) / keep.sum(1).clamp(min=1).double()
    close(found, torch.where(keep, plain * factor[:, None], 0.0))


@pytest.mark.checks("capo", "m_F ≥ 0 and grows with η²; m_H/η tends to <G,Δ> as η vanishes")
def test_learning_rate(tokens: Candidates) -> None:
    u = adam_step(tokens, moments(tokens), beta1=0.9, beta2=0.99, eps=1e-8)
    one, two = shifts(tokens, u, rate=0.1), shifts(tokens, u, rate=0.2)
    assert (one.policy >= 0).all()
    close(two.policy, 4 * one.policy)
    small = shifts(tokens, u, rate=1e-9).objective / 1e-9
    inner = tokens.advantage * (tokens.pull * u).sum(-1)
    close(small, inner, rtol=1e-6, atol=1e-6)


@pytest.mark.checks("capo", "all of the vocabulary among the candidates: the entries of v sum to 0")
def test_pull_sums_to_zero(batch: Batch, tokens: Candidates) -> None:
    close(tokens.pull.sum(-1), 0.0 * tokens.advantage)
    few = candidates(batch, k=1).at(batch.mask)
    missing = few.ids[:, 0] != batch.tokens[batch.mask]
    assert missing.any()
    close(few.pull[missing], -torch.ones_like(few.pull[missing]))  # e = 0: drawn elsewhere


@pytest.mark.checks("capo", "plain steps: m_F does not depend on the sign of A")
def test_sign(tokens: Candidates) -> None:
    other = tokens._replace(advantage=-tokens.advantage)
    one, two = (sgd_shifts(x, rate=0.3) for x in (tokens, other))
    close(one.policy, two.policy)
    assert not torch.allclose(one.objective, two.objective)


@pytest.mark.checks("capo", "a token certain of its action has v = 0 and is always kept")
def test_certain_tokens() -> None:
    batch = make_batch(1)
    certain = torch.full_like(batch.vocab_logp, -1e9)
    certain.scatter_(2, batch.tokens[..., None], 0.0)
    made = method("capo", optimizer="sgd", learning_rate=1e3)
    assert torch.equal(kept_tokens(made, batch.replace(vocab_logp=certain)), batch.mask)
    assert kept_tokens(made, batch).sum() < batch.mask.sum()


def test_bounds_are_strict_and_sides(tokens: Candidates, batch: Batch) -> None:
    found = sgd_shifts(tokens, rate=0.3)
    at = float(found.policy[found.policy > 0].median())
    options = {"optimizer": "sgd", "learning_rate": 0.3}
    made = method("capo", tau_policy=at, tau_objective=0.0, **options)
    assert torch.equal(kept_tokens(made, batch)[batch.mask], found.policy < at)
    rate = 20.0  # where the second order outweighs the first for some
    shift = sgd_shifts(tokens, rate=rate).objective
    bound = float(shift.abs().median())
    assert ((shift < 0) & (shift > -bound)).any()
    options["learning_rate"] = rate
    for sides, fits in (("two", shift.abs() < bound), ("one", (shift >= 0) & (shift < bound))):
        made = method("capo", tau_policy=0.0, tau_objective=bound, sides=sides, **options)
        assert torch.equal(kept_tokens(made, batch)[batch.mask], fits)


def test_the_trainers_rate_counts_unless_one_is_set(batch: Batch) -> None:
    made, own = method("capo"), method("capo", learning_rate=1e-9)
    assert torch.equal(kept_tokens(made, batch, clock=Clock(learning_rate=1e-9)), batch.mask)
    held = kept_tokens(made, batch, clock=Clock(learning_rate=0.05))
    assert held.sum() < batch.mask.sum()
    assert torch.equal(held, kept_tokens(method("capo", learning_rate=0.05), batch))
    assert torch.equal(kept_tokens(own, batch, clock=Clock(learning_rate=0.05)), batch.mask)
    official = kept_tokens(method("capo", learning_rate=1.5e-5), batch)
    assert torch.equal(kept_tokens(made, batch), official)


def test_everything_rejected() -> None:
    value, grads = loss_and_gradients(method("capo", tau_policy=1e-300), make_batch(1))
    assert value == 0
    assert grads["logp"].eq(0).all()


def stepped(made: proxpo.Recipe, state: dict, batch: Batch) -> dict:
    return made.step_state(state, batch, {}, Context())


def test_moments(batch: Batch) -> None:
    """Mean over the kept occurrences of each row; rows that are absent rest; t counts steps."""
    made = method("capo", learning_rate=0.05, k=2)
    state = made.init_state()
    for number in (1, 2):
        now = batch if number == 1 else batch.rows(torch.tensor([0, 1]))
        keep = kept_tokens(made, now, state=state[PLACE])[now.mask]
        tokens = candidates(now, k=2).at(now.mask)
        rows: dict[int, list[torch.Tensor]] = {}
        for n in keep.nonzero()[:, 0].tolist():
            for g, token in zip(gradient(tokens)[n], tokens.ids[n].tolist()):
                rows.setdefault(token, []).append(g)
        following = stepped(made, state, now)
        table, before = following[PLACE], state[PLACE]
        assert float(table["steps"]) == number
        for at, token in enumerate(table["token_id"].tolist()):
            known = before["token_id"].tolist()
            m, q = (
                before[x][known.index(token)] if token in known else torch.zeros(3).double()
                for x in ("first", "second")
            )
            if token in rows:
                mean = torch.stack(rows[token]).mean(0)
                m, q = 0.9 * m + 0.1 * mean, 0.999 * q + 0.001 * mean**2
            close(table["first"][at], m)
            close(table["second"][at], q)
        assert set(table["token_id"].tolist()) == set(rows) | set(before["token_id"].tolist())
        state = following
    moved, still = kept_tokens(made, batch, state=state[PLACE]), kept_tokens(made, batch)
    assert not torch.equal(moved, still)  # the next choice sees them


def test_memory_survives_a_file(batch: Batch, tmp_path: Path) -> None:
    made = method("capo", learning_rate=0.05)
    state = stepped(made, made.init_state(), batch)
    assert state[PLACE]["first"].shape == (4, 3)
    save_file(state[PLACE], tmp_path / "state.safetensors")
    restored = {PLACE: load_file(tmp_path / "state.safetensors")}
    one, two = (stepped(made, x, batch)[PLACE] for x in (state, restored))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_plain_model_has_no_memory(batch: Batch) -> None:
    made = method("capo", optimizer="sgd")
    assert stepped(made, made.init_state(), batch) == {PLACE: {}}


def test_tokens_at_a_time(tokens: Candidates, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    whole = adam_step(tokens, moments(tokens), **how)
    monkeypatch.setattr("proxpo.stages.select.curvature.MOST", 30)
    close(adam_step(tokens, moments(tokens), **how), whole, atol=0.0)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(proxpo.ProxpoError, match=r"curvature_mask needs .*'hidden'.*forward pass"):
        proxpo.loss_fn(method("capo"))(make_batch(1).replace(hidden=None))
