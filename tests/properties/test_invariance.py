"""What must not change the loss of any recipe: padding, order, and what masked positions hold."""

import math

import pytest
import torch
from fuzzing import times
from helpers import close, loss_and_gradients, make_batch, pad_columns, pad_rows, with_garbage
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.cases import CASES, recipe

from properties.strategies import Spec, specs
from proxpo import Batch

pytestmark = pytest.mark.long  # the shapes of every case are checked in tests/methods
every_case = pytest.mark.parametrize("case", CASES)
few = settings(max_examples=times(2))
COUNTS_EMPTY_ROWS = "dr-grpo-truncated"  # responses without end of sequence stay in the mean
LOOSE = {"rtol": 1e-9, "atol": 1e-11}  # sums in another order


def crop(grads: dict[str, torch.Tensor], like: Batch) -> dict[str, torch.Tensor]:
    """Gradients without the padding; fails if any flowed there."""
    rows, columns = like.mask.shape
    for grad in grads.values():
        assert grad[rows:].eq(0).all()
        assert grad[:, columns:].eq(0).all()
    return {name: grad[:rows, :columns] for name, grad in grads.items()}


@every_case
@few
@given(specs, st.integers(1, 4), st.sampled_from([1e30, math.nan, -math.inf, 123.0]))
def test_padding_columns_and_garbage(case: str, spec: Spec, columns: int, garbage: float) -> None:
    """Masked positions, inside a response and behind it, hold anything."""
    batch = spec.batch()
    value, grads = loss_and_gradients(recipe(case), batch)
    wide = pad_columns(with_garbage(batch, garbage), columns, garbage)
    found = loss_and_gradients(recipe(case), wide)
    close(found[0], value, **LOOSE)
    close(crop(found[1], batch), grads, **LOOSE)


@pytest.mark.parametrize("case", [case for case in CASES if case != COUNTS_EMPTY_ROWS])
@few
@given(specs, st.integers(1, 3))
def test_padding_rows(case: str, spec: Spec, rows: int) -> None:
    batch = spec.batch()
    value, grads = loss_and_gradients(recipe(case), batch)
    tall = loss_and_gradients(recipe(case), pad_rows(batch, rows))
    close(tall[0], value, **LOOSE)
    close(crop(tall[1], batch), grads, **LOOSE)


def test_only_that_case_counts_empty_rows() -> None:
    batch = make_batch(1)
    value, _ = loss_and_gradients(recipe(COUNTS_EMPTY_ROWS), batch)
    tall, _ = loss_and_gradients(recipe(COUNTS_EMPTY_ROWS), pad_rows(batch, 3))
    close(tall, value * 9 / 12)


# Where |A| ties, as in every group of two, pruning keeps the earlier row: test_cppo.py.
@pytest.mark.parametrize("case", [case for case in CASES if not recipe(case).prune])
@few
@given(specs, st.randoms(use_true_random=False))
def test_permuting_sequences(case: str, spec: Spec, random: object) -> None:
    batch = spec.batch()
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    relabelled = batch.replace(group=7 - 3 * batch.group)
    value, grads = loss_and_gradients(recipe(case), batch)
    shuffled = loss_and_gradients(recipe(case), relabelled.rows(torch.tensor(order)))
    close(shuffled[0], value, **LOOSE)
    close(shuffled[1], {name: grad[order] for name, grad in grads.items()}, **LOOSE)
