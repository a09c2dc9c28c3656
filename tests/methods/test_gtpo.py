import math
from typing import Any

import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import Numbers, centred, exp, groups, mean, number, row, tokens
from proxpo import Batch


def run_length(mine: list[int], good: list[list[int]], bad: list[list[int]]) -> int:
    """Leading tokens that some good and some bad response have at the same place."""
    for t, token in enumerate(mine):
        here = [any(len(x) > t and x[t] == token for x in side) for side in (good, bad)]
        if not all(here):
            return t
    return len(mine)


def token_runs(b: Batch) -> dict[int, tuple[int, int]]:
    a, out = centred(b), {}
    ids = {i: [int(b.tokens[i, t]) for t in row(b, i)] for i in range(len(b.mask))}
    for members in groups(b).values():
        exact = [b.rewards[i] == b.rewards[members[0]] for i in members]
        good = [ids[i] for i in members if a[i] > 1e-12 and not all(exact)]
        bad = [ids[i] for i in members if a[i] < -1e-12 and not all(exact)]
        for i in members:
            judged = abs(a[i]) > 1e-12
            lead = run_length(ids[i], good, bad)
            trail = run_length(ids[i][::-1], [x[::-1] for x in good], [x[::-1] for x in bad])
            out[i] = (lead, trail) if judged else (0, 0)
    return out


def conflict_weights(b: Batch, boost: float) -> Numbers:
    a, runs, out = centred(b), token_runs(b), {}
    for i, t in tokens(b):
        place, n = row(b, i).index(t), len(row(b, i))
        inside = boost if a[i] > 0 else 0.0
        out[i, t] = 1.0
        out[i, t] *= inside if place < runs[i][0] else 1.0
        out[i, t] *= inside if n - 1 - place < runs[i][1] else 1.0
    return out


def gtpo(b: Batch, *, gamma: float, most: float, boost: float = 2.0, code: bool = False) -> Any:
    a, lam, runs = centred(b), conflict_weights(b, boost), token_runs(b)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    h = {i: mean([number(b.entropy[i, t]) for t in row(b, i)]) for i in rows}
    active = code or mean(list(h.values())) <= most
    total = 0.0
    for i in rows:
        shaped = 0.0 if active and h[i] > most else a[i] - gamma * h[i]
        own = [exp(b.logp[i, t] - number(b.logp[i, t])) * lam[i, t] for t in row(b, i)]
        part = -shaped * mean(own)
        total = total + part / (max(1, *runs[i]) if code else len(rows))
    return total


CASES = {
    "gtpo": Case("gtpo", {}, lambda b: gtpo(b, gamma=0.1, most=math.log(2))),
    "gtpo-filtered": Case(
        "gtpo",
        {"max_entropy": 1.1, "gamma": 0.3, "boost": 3.0},
        lambda b: gtpo(b, gamma=0.3, most=1.1, boost=3.0),
    ),
    "gtpo-code": Case(
        "gtpo", {"code_compat": True}, lambda b: gtpo(b, gamma=0.1, most=0.7, code=True)
    ),
}


SLUG = "gtpo"


def spoken(rows: list[list[int]], rewards: list[float], **fields: object) -> Batch:
    """One group; the tokens as given, entropies of 0.5."""
    width = max(len(one) for one in rows)
    mask = torch.tensor([[t < len(one) for t in range(width)] for one in rows])
    logp = -1.0 - 0.1 * torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    return Batch(
        logp=logp,
        mask=mask,
        tokens=torch.tensor([one + [0] * (width - len(one)) for one in rows]),
        rewards=f64(rewards),
        group=torch.zeros(len(rows), dtype=torch.int64),
        entropy=torch.full_like(logp, 0.5),
    ).replace(**fields)


def weights(batch: Batch, **options: object) -> torch.Tensor:
    found = proxpo.prepare(method(SLUG, **options), batch).batch
    return torch.where(found.mask, found.conflict, 0.0)


@pytest.mark.checks(SLUG, "no conflict, γ = 0, no filter: on-policy GRPO without std")
def test_limit() -> None:
    batch = spoken([[1, 2, 3], [4, 5], [6, 7, 8]], [1, 0, 0.5])
    found = policy_gradient(method(SLUG, gamma=0.0, max_entropy=math.inf), batch)
    a, length = f64([0.5, -0.5, 0.0])[:, None], f64([3, 2, 3])[:, None]
    close(found, torch.where(batch.mask, -a / (3 * length), 0.0))


@pytest.mark.checks(SLUG, "shared ends: no push down on a negative response, W times up")
def test_leading_and_trailing_runs() -> None:
    batch = spoken([[1, 2, 7, 3], [1, 2, 8, 9, 3], [1, 5, 6, 3]], [1, 0, 0])
    expected = f64([[2, 2, 1, 2, 0], [0, 0, 1, 1, 0], [0, 1, 1, 0, 0]])
    close(weights(batch), expected)
    plain = spoken([[1, 2, 7, 3], [11, 12, 8, 9, 13], [14, 5, 6, 15]], [1, 0, 0])
    close(policy_gradient(method(SLUG), batch), expected * policy_gradient(method(SLUG), plain))
    close(weights(batch, boost=3.0)[0], f64([3, 3, 1, 3, 0]))


@pytest.mark.checks(SLUG, "an identical good and bad response: 4 and 0 on every token")
def test_identical() -> None:
    batch = spoken([[1, 2, 3], [1, 2, 3]], [1, 0])
    close(weights(batch), f64([[4, 4, 4], [0, 0, 0]]))


@pytest.mark.checks(SLUG, "a shared token in the middle keeps the weight 1")
def test_middle() -> None:
    batch = spoken([[1, 5, 2], [3, 5, 4]], [1, 0])
    close(weights(batch), torch.ones(2, 3).double())


def test_neutral_responses_and_one_sided_groups_have_no_conflict() -> None:
    same = [[1, 2], [1, 2], [1, 2]]
    close(weights(spoken(same, [1, 1, 1])), torch.ones(3, 2).double())
    close(weights(spoken(same, [1, 0, 0.5]))[2], f64([1, 1]))
    close(weights(spoken(same, [0.2, 0, 0.1]))[2], f64([1, 1]))  # their mean is 0.1 + 1e-17
    neutral_only = spoken([[1, 2], [3, 4], [1, 2]], [1, 0, 0.5])
    close(weights(neutral_only), torch.ones(3, 2).double())


def test_holes_and_other_groups() -> None:
    """Positions count valid tokens; a response to another prompt shares nothing."""
    batch = spoken([[1, 9, 2, 3], [1, 2, 4, 5]], [1, 0])
    holes = batch.mask.clone()
    holes[0, 1] = False
    close(weights(batch.replace(mask=holes)), f64([[2, 0, 2, 1], [0, 0, 1, 1]]))
    apart = batch.replace(mask=holes, group=torch.tensor([3, 1]))
    close(weights(apart), holes.double())


@pytest.mark.checks(SLUG, "H_i > h: the response contributes nothing")
def test_filter() -> None:
    batch = spoken([[1, 2], [3, 4], [5, 6]], [1, 0, 0])
    entropy = f64([[0.1, 0.2], [0.9, 0.8], [0.3, 0.6]])
    found = policy_gradient(method(SLUG), batch.replace(entropy=entropy))
    assert found[1].eq(0).all()
    expected = -(f64([2 / 3, -1 / 3]) - 0.1 * f64([0.15, 0.45])) / 6
    close(found[[0, 2]], expected[:, None].expand(2, 2))


def test_filter_needs_a_calm_start() -> None:
    """It acts only if the first batch of the run was below the bound on average."""
    made, batch = method(SLUG), spoken([[1, 2], [3, 4], [5, 6]], [1, 0, 0])
    lively = batch.replace(entropy=torch.full_like(batch.logp, 1.0))
    calm = batch.replace(entropy=torch.full_like(batch.logp, 0.2))
    for first, dropped in ((lively, False), (calm, True)):
        ready = proxpo.prepare(made, first)
        state = made.update_state(made.init_state(), ready.batch, ready.metrics)
        for _ in range(2):  # the first batch alone counts
            now = proxpo.prepare(made, lively, proxpo.Context(states=state))
            assert bool(now.batch.advantages.eq(0).all()) == dropped
            state = made.update_state(state, now.batch, now.metrics)
    released = proxpo.prepare(method(SLUG, code_compat=True), lively)
    assert released.batch.advantages.eq(0).all()


def test_each_update_takes_the_entropy_of_the_current_policy() -> None:
    made, batch = method(SLUG), spoken([[1, 2], [3, 4]], [1, 0])
    ready = proxpo.prepare(made, batch)
    moved = ready.batch.replace(entropy=torch.full_like(batch.logp, 0.6))
    value = proxpo.policy_loss(made, moved, ready.ctx).value
    close(value, -((0.5 - 0.06) + (-0.5 - 0.06)) / 2)


@pytest.mark.checks(SLUG, "old log-probabilities have no influence")
def test_no_old_policy() -> None:
    batch = make_batch(1)
    moved = batch.replace(old_logp=batch.old_logp + 1)
    close(policy_gradient(method(SLUG), moved), policy_gradient(method(SLUG), batch))
    assert "old_logp" not in {name for _, one in method(SLUG).stages() for name in one.needs}


def test_code_variant_divides_by_the_longer_run_and_sums() -> None:
    batch = spoken([[1, 2, 7, 3], [1, 2, 8, 9, 3]], [1, 0])
    published = policy_gradient(method(SLUG), batch)
    close(policy_gradient(method(SLUG, code_compat=True), batch), published * 2 / 2)
    longer = spoken([[1, 2, 4, 7, 3], [1, 2, 4, 9, 3]], [1, 0])
    expected = policy_gradient(method(SLUG), longer) * 2 / 3
    close(policy_gradient(method(SLUG, code_compat=True), longer), expected)


def test_bounds_on_the_entropy() -> None:
    """Those of the paper and of the code; a bound that lets nothing through is refused."""
    kept = {compat: method(SLUG, code_compat=compat).advantage.options for compat in (False, True)}
    close([kept[False]["most"], kept[True]["most"]], [math.log(2), 0.7])
    assert (kept[False]["if_calm"], kept[True]["if_calm"]) == (True, False)
    with pytest.raises(ValueError, match="most must be positive"):
        method(SLUG, max_entropy=0.0)


def test_missing_fields_are_named() -> None:
    batch = spoken([[1, 2], [3, 4]], [1, 0])
    with pytest.raises(
        ValueError, match="'tokens' \\(token ids of the response, from the sampler\\)"
    ):
        proxpo.loss_fn(method(SLUG))(batch.replace(tokens=None))
    with pytest.raises(ValueError, match="'entropy'"):
        proxpo.loss_fn(method(SLUG))(batch.replace(entropy=None))


def test_advantages_keep_the_penalty_where_rewards_are_equal() -> None:
    batch = spoken([[1, 2], [3, 4]], [1, 1])
    close(advantages(method(SLUG), batch), f64([[-0.05] * 2] * 2))
