import itertools
import math
from typing import Any

import pytest
import torch
from helpers import close, f64, method
from hypothesis import given, settings
from hypothesis import strategies as st

from methods._case import Case
from methods.loops import clipped, ratio, token_mean, z_scores
from proxpo import Batch, Context
from proxpo.stages.budget import allocate, knapsack_value
from proxpo.types import Budget


def knapsack(b: Batch) -> Any:
    a = {k: max(-0.9, min(0.9, value)) for k, value in z_scores(b).items()}
    return token_mean(clipped(ratio(b), a, 0.2, 0.28), b)


CASES = {
    "knapsack-rl": Case("knapsack-rl", {"bound": 0.9}, knapsack),
}


SLUG = "knapsack-rl"
PLACE = "budget.knapsack"
LIMITS = {"low": 2, "high": 128, "positive": 2, "negative": 2}


def shares(rates: list[float], n: int = 8, *, known: list[bool] | None = None, **options: object):
    """Rollouts for prompts with these pass rates."""
    seen = torch.ones(len(rates), dtype=torch.bool) if known is None else torch.tensor(known)
    default = torch.full((len(rates),), n)
    return allocate(f64(rates), seen, default, **(LIMITS | options)).tolist()


def worth(counts: list[int], rates: list[float]) -> float:
    return sum((1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2 for n, p in zip(counts, rates))


def best(rates: list[float], low: int, high: int, total: int) -> float:
    """By trying everything."""
    counts = itertools.product(range(low, high + 1), repeat=len(rates))
    return max(worth(list(one), rates) for one in counts if sum(one) == total)


@pytest.mark.checks(SLUG, "the value is 0 at p = 0, p = 1 and N = 1, grows, concave, to p(1-p)²")
def test_value() -> None:
    n = torch.arange(1, 300).double()
    for p in (0.02, 0.3, 0.5, 0.9):
        value = knapsack_value(n, f64(p).expand_as(n))
        close(value[0], 0.0)
        assert value.diff().min() >= 0
        assert value.diff().diff().max() <= 1e-15
        close(value[-1], p * (1 - p) ** 2, rtol=0.01)
    for p in (0.0, 1.0):
        close(knapsack_value(n, f64(p).expand_as(n)), 0.0)
    mixed = [float(knapsack_value(f64(8), f64(p))) / (p * (1 - p) ** 2) for p in (0.5, 0.05)]
    assert [round(x, 3) for x in mixed] == [0.992, 0.337]


@pytest.mark.checks(SLUG, "with many rollouts the best p is 1/3; p = 0.1 gets more than p = 0.9")
def test_preferences() -> None:
    p = torch.linspace(0.01, 0.99, 981, dtype=torch.float64)
    close(p[knapsack_value(torch.full_like(p, 1000.0), p).argmax()], 1 / 3, rtol=2e-3)
    hard, easy = shares([0.1, 0.9])
    assert hard > easy


@pytest.mark.checks(SLUG, "the published example: optimum and released programme")
def test_example() -> None:
    rates = [0.5, 0.1, 0.0, 1.0, 0.9, 0.02]
    assert shares(rates) == [9, 27, 2, 2, 6, 2]
    assert shares(rates, official=True) == [8, 27, 2, 2, 6, 3]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=4), st.integers(2, 5))
@pytest.mark.checks(SLUG, "greedy by marginal gain is the optimum over all allocations")
def test_optimum(sixteenths: list[int], n: int) -> None:
    rates = [k / 16 for k in sixteenths]
    found = shares(rates, n, high=9, fallback=False)
    assert sum(found) == n * len(rates)
    assert 2 <= min(found) <= max(found) <= 9
    close(worth(found, rates), best(rates, 2, 9, n * len(rates)))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 15), min_size=1, max_size=4), st.integers(2, 5))
def test_released_programme_is_the_optimum_of_its_own_values(sixteenths: list[int], n: int) -> None:
    rates = [k / 16 for k in sixteenths]
    found = shares(rates, n, high=7, fallback=False, official=True)

    def value(counts: tuple) -> float:
        return sum(worth([c], [p]) for c, p in zip(counts, rates) if c > 2)

    everything = itertools.product(range(2, 8), repeat=len(rates))
    top = max(value(one) for one in everything if sum(one) == n * len(rates))
    assert sum(found) == n * len(rates)
    close(value(tuple(found)), top)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 16), st.booleans()), min_size=1, max_size=12),
    st.integers(2, 9),
    st.booleans(),
    st.booleans(),
)
@pytest.mark.checks(SLUG, "the total is kept; effective prompts stay within their bounds")
def test_total(prompts: list, n: int, fallback: bool, official: bool) -> None:
    rates, known = [k / 16 for k, _ in prompts], [seen for _, seen in prompts]
    found = shares(rates, n, known=known, high=12, fallback=fallback, official=official)
    assert sum(found) == n * len(rates)
    inside = [c for c, p, seen in zip(found, rates, known) if seen and 0 < p < 1]
    assert all(2 <= c <= 12 for c in inside)


@pytest.mark.checks(SLUG, "equal rates: equal budgets up to 1; the order matters up to ties")
def test_equal_rates_and_order() -> None:
    found = shares([0.25] * 7 + [1.0] * 3)
    assert max(found[:7]) - min(found[:7]) <= 1
    rates = [0.5, 0.1, 0.0, 1.0, 0.9, 0.02, 0.3]
    order = [4, 2, 6, 0, 5, 1, 3]
    there, back = shares(rates), shares([rates[i] for i in order])
    assert [there[i] for i in order] == back


@pytest.mark.checks(SLUG, "all prompts unseen: everybody keeps n")
def test_unseen() -> None:
    assert shares([0.5, 0.2, 0.0], known=[False] * 3) == [8, 8, 8]
    assert shares([1.0, 1.0]) == [8, 8]
    assert shares([0.0, 1.0, 0.0]) == [11, 2, 11]


def test_surplus_goes_to_unsolved_prompts() -> None:
    """ln 0.1/ln 0.5 is 3.3: the one mixed prompt takes 3 more, the rest is shared."""
    assert shares([0.5, 0.0, 0.0, 1.0]) == [5, 13, 12, 2]
    assert shares([0.5, 1.0, 1.0]) == [5, 10, 9]
    assert shares([0.5, 0.0, 0.5], known=[True, False, True]) == [5, 14, 5]
    assert shares([0.5, 0.5]) == [8, 8]  # nobody else to take it
    assert shares([0.5, 0.0, 0.0], cost="expectation") == [5, 10, 9]
    assert shares([0.5, 0.0, 0.0], fallback=False) == [20, 2, 2]


# The history of a prompt --------------------------------------------------------------------------


def seen(*visits: list[int], prompt: int = 3, **options: object) -> dict[str, float]:
    """What is remembered of a prompt after visits with these outcomes."""
    made = method(SLUG, **options)
    state = made.init_state()
    for right in visits:
        state = made.update_state(state, answers(right, prompt), {})
    table = state[PLACE]
    assert table["prompt_id"].tolist() == [prompt]
    return {name: float(table[name][0]) for name in ("rate", "recorded")}


def answers(right: list[int], prompt: int) -> Batch:
    rows = len(right)
    return Batch(
        logp=torch.zeros(rows, 1, dtype=torch.float64),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        rewards=f64(right),
        truncated=torch.arange(rows) == 0,  # its reward alone says whether it is right
        prompt_id=torch.full((rows,), prompt),
    )


def test_rate_of_the_last_visit_or_of_the_last_sixteen() -> None:
    assert seen([1, 0, 0, 0]) == {"rate": 0.25, "recorded": 4}
    assert seen([1, 0, 0, 0], [1, 1, 1, 1]) == {"rate": 5 / 8, "recorded": 8}
    assert seen([1] * 16, [0] * 16) == {"rate": 0.0, "recorded": 32}
    assert seen([1] * 20, [1] * 4 + [0] * 16)["rate"] == 4 / 20
    assert seen([0] * 10 + [1] * 30)["rate"] == 0.75
    assert seen([1] * 9 + [0] * 3, [0, 1, 0, 0] * 2)["rate"] == (5 + 2) / 16
    assert seen([1, 1, -1], [0, 1, 1], window=4)["rate"] == 2 / 4


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=6))
def test_history_equals_lists(outcomes: list[list[int]]) -> None:
    everything = [x for visit in outcomes for x in visit]
    last = outcomes[-1]
    expected = last if len(last) >= 16 else everything[-16:]
    close(seen(*outcomes)["rate"], sum(expected) / len(expected))


def test_stage_reads_its_history() -> None:
    made = method(SLUG)
    state = made.init_state()
    for prompt, right in ((11, [1, 0] * 4), (5, [1] * 8), (2, [0] * 8), (7, [0, 1, 0])):
        state = made.update_state(state, answers(right, prompt), {})
    ids = torch.tensor([2, 99, 11, 5, 7])
    budget = Budget(prompt_id=ids, samples=torch.full((5,), 8), max_tokens=torch.full((5,), 64))
    found, metrics = made.budget[0].apply(budget, Context(state=state[PLACE]))
    expected = shares([0.0, 0.0, 0.5, 1.0, 0.0], known=[True, False, True, True, False])
    assert found.samples.tolist() == expected
    assert torch.equal(found.max_tokens, budget.max_tokens)
    close(metrics["budget/effective"], 0.2)
    first, _ = made.budget[0].apply(budget, Context())
    assert first.samples.tolist() == [8] * 5


def test_refused() -> None:
    budget = Budget(
        prompt_id=torch.arange(3), samples=torch.full((3,), 4), max_tokens=torch.full((3,), 9)
    )
    for options in ({"low": 5}, {"negative": 6}, {"high": 3}):
        stage = method(SLUG, **options).budget[0]
        with pytest.raises(ValueError, match="with 4 samples a prompt"):
            stage.apply(budget, Context())
    for options in ({"low": 0}, {"low": 9, "high": 8}, {"window": 99}):
        with pytest.raises(ValueError, match="budget=knapsack"):
            method(SLUG, **options)
    rewards = answers([1, 0], 3).replace(rewards=f64([0.5, 1]))
    with pytest.raises(ValueError, match=r"reward of response 0 is 0\.5"):
        method(SLUG).update_state(method(SLUG).init_state(), rewards, {})


def test_ten_thousand_prompts_share_what_there_is() -> None:
    g = torch.Generator().manual_seed(0)
    rate = torch.randint(0, 17, (10_000,), generator=g).double() / 16
    known, default = torch.ones(10_000, dtype=torch.bool), torch.full((10_000,), 8)
    found = allocate(rate, known, default, **LIMITS)
    assert int(found.sum()) == 80_000
    assert math.isfinite(worth(found.tolist(), rate.tolist()))
