from typing import Any

import pytest
import torch
from helpers import close, f64, loss_and_gradients, make_batch, method
from hypothesis import given, settings
from hypothesis import strategies as st

import proxpo
from methods._case import Case
from methods.loops import clipped, ratio, seq_mean_token_mean, z_scores
from proxpo import Batch, Context
from proxpo.types import Budget


def palu(b: Batch) -> Any:
    failed = [0.0 if cut else r for r, cut in zip(b.rewards.tolist(), b.truncated.tolist())]
    b = b.replace(rewards=torch.tensor(failed, dtype=torch.float64))
    return seq_mean_token_mean(clipped(ratio(b), z_scores(b), 0.2, 0.2), b)


CASES = {
    "palu": Case("palu", {}, palu),
}


SLUG = "palu"
PLACE = "budget.length_budget"


def visit(lengths: list[int], right: list[int], *, prompt: int = 7, **fields: object) -> Batch:
    """Responses of one prompt; thousands of tokens cost one column per token."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Batch(
        logp=torch.zeros(mask.shape, dtype=torch.float64),
        old_logp=torch.zeros(mask.shape, dtype=torch.float64),
        mask=mask,
        rewards=f64(right),
        group=torch.zeros(len(lengths), dtype=torch.int64),
        prompt_id=torch.full((len(lengths),), prompt),
    ).replace(**fields)


def after(*batches: Batch, limit: int = 8000, prompt: int = 7, **options: object) -> int:
    """The budget of the prompt once these visits have been seen."""
    made = method(SLUG, **options)
    state = made.init_state()
    for batch in batches:
        state = made.update_state(state, batch, {})
    start = Budget(
        prompt_id=torch.tensor([prompt]),
        samples=torch.tensor([8]),
        max_tokens=torch.tensor([limit]),
    )
    found, seen = made.budget[0].apply(start, Context(state=state[PLACE]))
    assert seen["budget/tokens"] == found.max_tokens[0]
    assert torch.equal(found.samples, start.samples)
    return int(found.max_tokens[0])


@pytest.mark.checks(SLUG, "lengths 3000, 4000, 5000, 6000, 8000 all right: 8000 becomes 5000")
def test_example() -> None:
    assert after(visit([3000, 4000, 5000, 6000, 8000], [1] * 5)) == 5000


@pytest.mark.checks(SLUG, "below C the budget is restored; a rate of exactly C compresses")
def test_target() -> None:
    solved = visit([10, 20, 30, 40, 50], [1] * 5)
    exactly = visit([10, 20, 30, 40, 50], [1, 1, 1, 1, 0])
    below = visit([10, 20, 30, 40, 50], [1, 1, 1, 0, 0])
    assert after(solved, limit=100) == 80
    assert after(solved, exactly, limit=100) == 65
    assert after(solved, solved, below, limit=100) == 100
    assert after(below, limit=100) == 100


@pytest.mark.checks(SLUG, "τ = 0 moves nothing; τ = 1: longest minus shortest right response")
def test_tau() -> None:
    batch = visit([10, 25, 31, 44], [1] * 4)
    assert after(batch, tau=0.0, limit=100) == 100
    assert after(batch, tau=1.0, limit=100) == 100 - 34


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=6),
    st.integers(0, 30),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
)
@pytest.mark.checks(SLUG, "α grows with τ, is never negative, and ignores a constant length")
def test_step(lengths: list[int], shift: int, tau: float) -> None:
    limit = 500
    found = after(visit(lengths, [1] * len(lengths)), tau=tau, limit=limit)
    assert found <= limit
    assert after(visit(lengths, [1] * len(lengths)), tau=tau + 0.1, limit=limit) <= found
    longer = [n + shift for n in lengths]
    assert after(visit(longer, [1] * len(lengths)), tau=tau, limit=limit) == found


@pytest.mark.checks(SLUG, "lengths of wrong responses do not matter")
def test_wrong_lengths() -> None:
    one = visit([10, 20, 30, 40, 50, 60], [1, 1, 1, 1, 1, 0])
    other = visit([10, 20, 30, 40, 50, 3], [1, 1, 1, 1, 1, 0])
    assert after(one, limit=100) == after(other, limit=100) == 80


@pytest.mark.checks(SLUG, "C > 1 never compresses; the loss is the base method's")
def test_never_compresses() -> None:
    assert after(visit([10, 50], [1, 1]), target=1.1, limit=100) == 100
    batch = make_batch(1)
    whole = batch.replace(truncated=torch.zeros_like(batch.truncated))
    for ours, base in zip(
        loss_and_gradients(method(SLUG, target=1.1), whole),
        loss_and_gradients(method("grpo"), whole),
    ):
        close(ours, base)


def test_truncated_is_wrong_for_the_budget_and_for_the_reward() -> None:
    cut = torch.tensor([False, False, False, False, True])
    batch = visit([10, 20, 30, 40, 50], [1] * 5, truncated=cut)
    assert after(batch, limit=100) == 85  # 4 of 5 right, lengths 10 to 40
    assert after(batch, target=0.9, limit=100) == 100
    made = method(SLUG)
    assert proxpo.prepare(made, batch).batch.rewards.tolist() == [1, 1, 1, 1, 0]


def test_budgets_round_down_and_stop_at_the_minimum() -> None:
    batch = visit([10, 11], [1, 1])  # α = 0.5
    assert after(batch, limit=100) == 99
    shrink = visit([10, 90], [1, 1])  # α = 40
    assert after(shrink, shrink, shrink, limit=100, min_tokens=16) == 16
    assert after(batch, limit=8, min_tokens=16) == 8  # never above what came in


def test_prompts_are_kept_apart_and_unscored_or_pruned_responses_left_out() -> None:
    batch = visit([10, 20, 30, 40], [1, 1, float("nan"), 1])
    assert after(batch, tau=1.0, limit=100) == 70
    assert after(batch, limit=100, prompt=8) == 100
    gone = batch.mask.clone()
    gone[0] = False
    assert after(batch.replace(mask=gone), tau=1.0, limit=100) == 80
    with pytest.raises(ValueError, match="'prompt_id' \\(number of the prompt in its dataset"):
        after(batch.replace(prompt_id=None))


def test_refused() -> None:
    for options, line in (({"tau": 2}, "tau"), ({"min_tokens": 0}, "min_tokens")):
        with pytest.raises(ValueError, match=line):
            method(SLUG, **options)
