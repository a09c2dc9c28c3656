"""Results of a module that is run again: exact from what it returns, refused from elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import nll, padded
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from proxpo.errors import ProxpoError
from proxpo.gradients import isopo

A = torch.tensor([1.0, -0.6, 0.3]).double()
LENGTHS = [5, 7, 4]
WIDTH = 6
EXACT = {"rtol": 1e-10, "atol": 1e-12}
pytestmark = pytest.mark.filterwarnings("ignore:gradients.applied. no per-sequence form")


@dataclass
class Fields:
    hidden: Any
    name: str = "fields"


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Scaled(nn.Module):
    """h = tanh(W x) exp(a), handed over by `leave`."""

    def __init__(self, leave: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.leave = leave

    def forward(self, x: Tensor, cache: list, state: Any = None) -> Any:
        h = torch.tanh(self.mix(x.clone())) * self.a.exp()
        return self.leave(self, x, h, cache, state)


class Around(nn.Module):
    """Reads the result of `middle` by `read`."""

    def __init__(self, leave: Callable[..., Any], read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.middle = Scaled(leave)
        self.head = nn.Linear(WIDTH, 13)
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        cache: list[Any] = []
        state = SimpleNamespace(kept=None)
        x = self.embed(ids) * 1.0
        out = self.middle(x, cache, state=state)
        return self.head(self.read(out, self.middle, cache, state, x))


def made(leave: Callable[..., Any], read: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Around(leave, read).double()


def gradients(model: nn.Module, *, plain: bool = False) -> dict[str, Tensor | None]:
    ids, seq = padded(LENGTHS, 13)
    model.zero_grad()
    if plain:
        (A @ nll(model(ids), ids, seq).sum(1)).backward()
    else:
        with isopo(preset="reinforce").applied(model, sequences=seq, advantages=A):
            nll(model(ids), ids, seq).sum().backward()
    return {name: value.grad for name, value in model.named_parameters()}


def store(m: nn.Module, x: Tensor, h: Tensor, cache: list, state: Any) -> Tensor:
    """Keeps what nobody differentiates, as for a log."""
    m.last, m.pair, state.kept = h, (h, [h]), h
    cache.append(h)
    return h


RETURNED = {
    "dataclass": (lambda m, x, h, *_: Fields(h), lambda out, *_: out.hidden),
    "frozen dataclass": (lambda m, x, h, *_: Frozen(h), lambda out, *_: out.hidden),
    "namespace": (lambda m, x, h, *_: SimpleNamespace(h=h, n=1), lambda out, *_: out.h),
    "nested": (
        lambda m, x, h, *_: (None, Fields({"a": [Frozen(h), h]})),
        lambda out, *_: out[1].hidden["a"][0].hidden + 2 * out[1].hidden["a"][1],
    ),
    "kept in the module too": (
        lambda m, x, h, *_: (setattr(m, "last", Fields(h)), m.last)[1],
        lambda out, *_: out.hidden,
    ),
    "stored and not used": (store, lambda out, *_: out),
}  # fmt: skip


@pytest.mark.parametrize(("leave", "read"), RETURNED.values(), ids=RETURNED.keys())
def test_what_a_module_returns_has_its_whole_gradient(leave, read):
    model = made(leave, read)
    actual = gradients(model)
    assert_close(actual, gradients(model, plain=True), **EXACT)


def append(m: nn.Module, x: Tensor, h: Tensor, cache: list, state: Any) -> Tensor:
    cache.append(h)
    return x + h


def keep(m: nn.Module, x: Tensor, h: Tensor, cache: list, state: Any) -> Tensor:
    m.last, m.pair, state.kept = h, (x, h), h
    return x + h


def change_in_place(m: nn.Module, x: Tensor, h: Tensor, *_: Any) -> None:
    x.add_(h)


ELSEWHERE = {
    "object": (lambda m, x, h, *_: Plain(h), lambda out, *_: out.hidden),
    "attribute": (lambda *a: keep(*a) - a[2], lambda out, m, *_: out + m.last),
    "attribute alone": (lambda *a: (keep(*a), a[1])[1], lambda out, m, *_: out + m.last),
    "attribute and result": (keep, lambda out, m, *_: out + m.last),
    "tuple in an attribute": (keep, lambda out, m, *_: out + m.pair[1]),
    "attribute of an input": (keep, lambda out, m, cache, state, x: out + state.kept),
    "list alone": (lambda *a: (append(*a), a[1])[1], lambda out, m, cache, *_: out + cache[0]),
    "list and result": (append, lambda out, m, cache, *_: out + 2 * cache[0]),
    "input changed in place": (change_in_place, lambda out, m, cache, state, x: x),
}  # fmt: skip


@pytest.mark.parametrize(("leave", "read"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_result_that_leaves_by_another_way_is_refused(leave, read):
    model = made(leave, read)
    reason = r"middle \(Scaled: a\) .* used otherwise than from its return value"
    for _ in range(2):
        with pytest.raises(ProxpoError, match=reason):
            gradients(model)
    assert gradients(model, plain=True)["middle.a"].any()


def in_a_segment(reentrant: bool) -> Callable[..., Any]:
    def leave(m: nn.Module, x: Tensor, h: Tensor, *_: Any) -> Tensor:
        return x + checkpoint(lambda y: torch.tanh(m.mix(y)) * y, h, use_reentrant=reentrant)

    return leave


def test_a_checkpointed_segment_of_the_module_runs_again_too():
    model = made(in_a_segment(False), lambda out, *_: out)
    actual = gradients(model)
    assert_close(actual, gradients(model, plain=True), **EXACT)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_segment_of_the_module_is_refused():
    model = made(in_a_segment(True), lambda out, *_: out)
    with pytest.raises(ProxpoError, match=r"middle \(Scaled: a\) .*; take use_reentrant=False"):
        gradients(model)
