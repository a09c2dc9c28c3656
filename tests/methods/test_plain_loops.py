"""Every method and option against plain loops, in value and gradient, on ragged batches."""

import pytest
from helpers import close, gradients, loss_and_gradients, make_batch, with_leaves

import proxpo
from methods.cases import CASES, recipe

MARKED = [
    pytest.param(
        case,
        marks=pytest.mark.checks(CASES[case].slug, "equals plain loops in value and gradient"),
        id=case,
    )
    for case in CASES
]


def test_every_method_of_the_catalogue_has_a_reference() -> None:
    assert {case.slug for case in CASES.values()} == set(proxpo.methods("language"))


@pytest.mark.parametrize("case", MARKED)
@pytest.mark.parametrize(("seed", "spread"), [(1, 0.2), (3, 0.6)], ids=["near", "far"])
def test_equals_plain_loops(case: str, seed: int, spread: float) -> None:
    batch = make_batch(seed, spread=spread)
    value, grads = loss_and_gradients(recipe(case), batch)
    leaves = with_leaves(batch)
    expected = CASES[case].reference(leaves)
    close(value, expected.detach())
    close(grads, gradients(expected, leaves))
