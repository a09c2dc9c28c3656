import math
from typing import Any

import pytest
import torch
from helpers import advantages, close, f64, make_batch, method
from hypothesis import given, settings
from hypothesis import strategies as st

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    centred,
    clipped,
    k3,
    mean,
    number,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch
from proxpo.ops.extremes import batch_max, batch_min


def step_of(b: Batch, i: int, t: int, steps: str) -> int:
    if steps == "turn":
        return int(b.turn[i, t])
    if steps == "response":
        return 0
    return sum(1 for s in row(b, i) if s <= t and s - 1 not in row(b, i))


def empg(b: Batch, *, k: float, k_next: float, bonus: float, steps: str, base: dict) -> Numbers:
    found: dict[tuple[int, int], list[float]] = {}
    for i, t in tokens(b):
        found.setdefault((i, step_of(b, i, t, steps)), []).append(number(b.entropy[i, t]))
    h = {at: mean(values) for at, values in found.items()}
    low, high = min(h.values()), max(h.values())
    h = {at: (value - low) / (high - low + 1e-8) for at, value in h.items()}
    norm = mean([math.exp(-k * value) for value in h.values()]) + 1e-8
    out = {}
    for i, s in h:
        later = sorted(other for row_number, other in h if row_number == i and other > s)
        clear = math.exp(-k_next * h[i, later[0]]) if later else 0.0
        out[i, s] = base[i] * math.exp(-k * h[i, s]) / norm + bonus * clear
    middle = mean(list(out.values()))
    return {(i, t): out[i, step_of(b, i, t, steps)] - middle for i, t in tokens(b)}


def row_scores(b: Batch) -> dict[int, float]:
    return {i: value for (i, _), value in z_scores(b).items()}


def empg_loss(a: Numbers, b: Batch, *, kl_coef: float = 0.0) -> Any:
    x = clipped(ratio(b), a, 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


CASES = {
    "empg": Case(
        "empg",
        {},
        lambda b: empg_loss(
            empg(b, k=1.0, k_next=1.0, bonus=0.1, steps="turn", base=row_scores(b)), b
        ),
    ),
    "empg-response": Case(
        "empg",
        {"split": "response", "scale": "none", "k": 2.0},
        lambda b: empg_loss(
            empg(b, k=2.0, k_next=1.0, bonus=0.1, steps="response", base=centred(b)), b
        ),
    ),
    "empg-runs": Case(
        "empg",
        {"split": "mask", "bonus": 0.5, "k_future": 3.0, "kl_coef": 0.1},
        lambda b: empg_loss(
            empg(b, k=1.0, k_next=3.0, bonus=0.5, steps="mask", base=row_scores(b)), b, kl_coef=0.1
        ),
    ),
}


SLUG = "empg"


def agent(rewards: list[float], entropies: list[list[float]], length: int = 2) -> Batch:
    """One group; each inner list holds the entropies of the steps of a trajectory."""
    steps = max(len(one) for one in entropies)
    rows = [[h for h in one for _ in range(length)] for one in entropies]
    width = steps * length
    mask = torch.tensor([[t < len(one) for t in range(width)] for one in rows])
    logp = torch.full(mask.shape, -1.0, dtype=torch.float64)
    return Batch(
        logp=logp,
        old_logp=logp.clone(),
        mask=mask,
        entropy=f64([one + [math.nan] * (width - len(one)) for one in rows]),
        turn=(torch.arange(width) // length).expand(len(rows), width).clone(),
        rewards=f64(rewards),
        group=torch.zeros(len(rows), dtype=torch.int64),
    )


def of_steps(batch: Batch, **options: object) -> torch.Tensor:
    """A of each step, trajectory after trajectory; all tokens of a step share it."""
    found = advantages(method(SLUG, **options), batch)
    first, second = found[:, ::2], found[:, 1::2]
    close(first, second)
    return first[batch.mask[:, ::2]]


@pytest.mark.checks(SLUG, "k = 0, ζ = 0: the base advantage minus its mean over steps")
def test_limit() -> None:
    batch = agent([1, 0, 0], [[0.3, 0.9, 0.1], [0.5], [0.2, 0.7]])
    base = advantages(method("grpo"), batch)[:, ::2][batch.mask[:, ::2]]
    found = of_steps(batch, k=0, bonus=0)
    close(found, base - base.mean(), rtol=1e-7)
    even = agent([1, 0, 0], [[0.3, 0.9], [0.5, 0.1], [0.2, 0.7]])
    close(of_steps(even, k=0, bonus=0), advantages(method("grpo"), even)[:, ::2].flatten(),
          rtol=1e-7)  # fmt: skip


@pytest.mark.checks(SLUG, "mean g = 1, g falls with H, max g/min g = e^k, whatever the scale of H")
@pytest.mark.parametrize("k", [0.5, 1.0, 3.0])
def test_modulation(k: float) -> None:
    entropies = [[0.3, 0.9, 0.1], [0.5], [0.2, 0.7]]
    batch = agent([1, 0, 0], entropies)
    ones = batch.replace(rewards=f64([1, 1, 1]), group=torch.arange(3))  # alone: A = 1
    found = of_steps(ones, k=k, bonus=0.0)
    g = found + 1  # centring has taken the mean, 1
    close(found.sum(), 0.0, atol=1e-10)
    order = torch.tensor([h for one in entropies for h in one]).argsort()
    assert g[order].diff().max() < 0
    close(g.max() / g.min(), math.exp(k), rtol=1e-6)
    scaled = ones.replace(entropy=7 * batch.entropy + 3)
    close(of_steps(scaled, k=k, bonus=0.0), found, rtol=1e-6)
    signs = of_steps(batch, k=k, bonus=0.0)
    base = advantages(method("grpo"), batch)[:, ::2][batch.mask[:, ::2]]
    shift = signs - base * g
    close(shift, shift[0].expand_as(shift), rtol=1e-6)  # A g keeps the sign of A


@pytest.mark.checks(SLUG, "the advantages of all steps add up to 0")
def test_centred() -> None:
    batch = agent([1, 0, 0.3], [[0.3, 0.9, 0.1], [0.5], [0.2, 0.7]])
    close(of_steps(batch, bonus=0.7).sum(), 0.0)


@pytest.mark.checks(SLUG, "no bonus for the last step; a clearer next step earns more")
def test_bonus() -> None:
    batch = agent([1, 1], [[0.5, 0.1], [0.5, 0.9]])  # equal rewards: A = 0
    found = of_steps(batch, bonus=1.0)
    to_clear, last, to_unclear, other_last = found
    close(last, other_last)
    assert to_clear > to_unclear > last
    close(to_clear - last, 1.0)  # H̃ = 0 next
    close(to_unclear - last, math.exp(-1), rtol=1e-6)


def test_an_empty_step_is_skipped() -> None:
    batch = agent([1, 0], [[0.5, 0.9, 0.1], [0.2, 0.7]])
    gap = batch.turn.clone()
    gap[0, 2:] += 3
    close(of_steps(batch.replace(turn=gap)), of_steps(batch))


def test_one_step_gives_nothing() -> None:
    close(of_steps(agent([1.0], [[0.4]])), f64([0.0]), atol=1e-7)


def test_equal_entropies_leave_the_advantage() -> None:
    batch = agent([1, 0], [[0.4, 0.4], [0.4, 0.4]])
    base = advantages(method("grpo"), batch)[:, ::2].flatten()
    close(of_steps(batch, bonus=0.0), base, rtol=1e-7)


@pytest.mark.checks(SLUG, "permuting trajectories permutes the result; splitting changes it")
def test_statistics_of_the_whole_batch() -> None:
    batch = make_batch(5, holes=False)
    found = advantages(method(SLUG), batch)
    order = torch.randperm(len(batch.mask))
    close(advantages(method(SLUG), batch.rows(order)), found[order], rtol=1e-9)
    part = batch.rows(slice(0, 3))
    assert (advantages(method(SLUG), part) - found[:3]).abs().max() > 1e-3


def test_turns_must_be_given_or_chosen() -> None:
    batch = make_batch(1).replace(turn=None)
    with pytest.raises(ValueError, match="'turn' \\(number of the turn"):
        proxpo.prepare(method(SLUG), batch)
    proxpo.prepare(method(SLUG, split="response"), batch)


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=60)
@given(st.lists(st.lists(finite, max_size=4), min_size=1, max_size=3))
def test_extremes_from_sums(parts: list[list[float]]) -> None:
    """Every rank adds its counts to those of the others, and all find the same extreme."""
    everything = [x for part in parts for x in part]
    for find, expected in ((batch_max, max), (batch_min, min)):
        rounds: list[list[torch.Tensor]] = []
        wanted = 0.0 if not everything else expected(everything) + 0.0

        def run(part: list[float], known: list[torch.Tensor], find=find) -> tuple:
            asked: list[torch.Tensor] = []

            def all_sum(x: torch.Tensor, scope: str = "batch") -> torch.Tensor:
                asked.append(x)
                return known[len(asked) - 1] if len(asked) <= len(known) else x

            x = f64(part)
            return find(x, torch.ones_like(x, dtype=torch.bool), all_sum=all_sum), asked

        known: list[torch.Tensor] = []
        while True:
            rounds = [run(part, known)[1] for part in parts]
            if all(len(asked) <= len(known) for asked in rounds):
                break
            known.append(sum(asked[len(known)] for asked in rounds))
        assert all(float(run(part, known)[0]) == wanted for part in parts)
