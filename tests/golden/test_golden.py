"""Losses and gradients of every recipe on a fixed batch, recorded to the last digit."""

import pytest
from helpers import close, with_leaves
from methods.cases import CASES

from golden.golden import FOLDER, compute, read, read_batch


@pytest.mark.parametrize("case", CASES)
def test_recorded_values(case: str) -> None:
    expected, found = read(case), compute(case)
    assert found.keys() == expected.keys()
    close(found["loss"], expected["loss"], rtol=1e-12, atol=1e-15)
    for name in expected.keys() - {"loss"}:
        close(found[name].flatten(1), expected[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_recorded_losses_are_the_definitions(case: str) -> None:
    """The record itself, against plain loops: a wrong number cannot be written down unseen."""
    close(read(case)["loss"], CASES[case].reference(with_leaves(read_batch())).detach(), rtol=1e-10)


def test_nothing_else_is_recorded() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)
