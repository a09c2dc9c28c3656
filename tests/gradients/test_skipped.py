"""An update that is not finite, or is left out, leaves a transform as it was."""

import pytest
import torch
from models import Tiny, nll, padded
from torch import Tensor
from torch.testing import assert_close

from proxpo.errors import NotFiniteError
from proxpo.gradients import Transform, isopo, isopo_ntk, proma

A = torch.tensor([1.0, -0.6, 0.3]).double()
BATCHES = [padded([5, 7, 4], 13, seed=seed) for seed in range(3)]
MAKERS = {
    "isopo": lambda: isopo(overlap=6, p=-1.0, q=-0.5, reg=0.5),
    "relative": lambda: isopo(overlap="all", preset="nearest-npg", reg=1.0, keep_small=True),
    "ntk": lambda: isopo_ntk(rho=0.5),
    "proma": lambda: proma(rho=None),
    "proma, exact": lambda: proma(solver="exact"),
    "proma, both": lambda: proma(variant="both", dim=2, bases="exact"),
}
OVERFLOW = 1e250  # a finite gradient whose squared length is not
SPOILS = [
    ("isopo", torch.nan),
    ("isopo", OVERFLOW),
    ("relative", torch.inf),
    ("ntk", torch.nan),
    ("ntk", OVERFLOW),
    ("proma", torch.nan),
    ("proma, exact", torch.inf),
    ("proma, both", torch.nan),
]


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=4).double()


def block(model: Tiny, transform: Transform, number: int, factor: float = 1.0) -> None:
    ids, seq = BATCHES[number]
    with transform.applied(model, sequences=seq, advantages=A):
        (factor * nll(model(ids, seq), ids, seq).sum()).backward()


def update(model: Tiny, transform: Transform) -> dict[str, Tensor]:
    """Two micro-batches and a step; the gradient they made."""
    model.zero_grad()
    block(model, transform, 0)
    block(model, transform, 1)
    transform.step()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def spoilt(model: Tiny, transform: Transform, factor: float, place: int) -> None:
    """An update of two micro-batches of which the one at `place` is not finite."""
    model.zero_grad()
    for number in range(2):
        try:
            block(model, transform, 2 - number, factor if number == place else 1.0)
        except NotFiniteError:
            assert number >= place
    model.zero_grad()


def assert_equal(actual: Transform, want: Transform) -> None:
    assert_close(actual.state_dict(), want.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("ending", ["step", "skipped", "nothing"])
@pytest.mark.parametrize(("name", "factor"), SPOILS)
def test_an_update_that_is_not_finite_leaves_no_trace(model, name, factor, ending):
    """However the loop ends such an update, the next one is what it would have been."""
    clean, transform = MAKERS[name](), MAKERS[name]()
    update(model, clean)
    want = update(model, clean)
    update(model, transform)
    for place in range(2):
        spoilt(model, transform, factor, place)
        if ending != "nothing":
            transform.step(skipped=ending == "skipped")
    assert_close(update(model, transform), want, rtol=0, atol=0)
    assert_equal(transform, clean)


@pytest.mark.parametrize("name", MAKERS)
def test_a_finite_update_that_is_left_out_leaves_no_trace(model, name):
    """The gradient's norm, or a scaler, may speak against an update that the blocks have passed."""
    clean, transform = MAKERS[name](), MAKERS[name]()
    update(model, clean)
    want = update(model, clean)
    update(model, transform)
    block(model, transform, 2)
    transform.step(skipped=True)
    assert_close(update(model, transform), want, rtol=0, atol=0)
    assert_equal(transform, clean)


@pytest.mark.parametrize("name", MAKERS)
def test_a_block_that_fails_can_be_run_again(model, name):
    """Memory ran out, say: of the failed block nothing is kept, of those before it everything."""
    clean, transform = MAKERS[name](), MAKERS[name]()
    want = update(model, clean)
    model.zero_grad()
    block(model, transform, 0)
    ids, seq = BATCHES[1]

    def interrupted() -> None:
        with transform.applied(model, sequences=seq, advantages=A):
            loss = nll(model(ids, seq), ids, seq).sum()
            torch.autograd.grad(loss, list(model.parameters()))
            raise MemoryError

    with pytest.raises(MemoryError):
        interrupted()
    block(model, transform, 1)
    transform.step()
    assert_close({n: p.grad for n, p in model.named_parameters()}, want, rtol=0, atol=0)
    assert_equal(transform, clean)
