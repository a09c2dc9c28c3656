"""Two processes that talk over gloo equal one that accumulates their micro-batches."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import two_processes
from models import Tiny, nll, padded
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from proxpo.errors import NotFiniteError, ProxpoError
from proxpo.gradients import Transform, isopo, isopo_ntk, proma

A = (torch.tensor([1.0, -0.6, 0.3]).double(), torch.tensor([-0.2, 0.9]).double())
LENGTHS = ([5, 7, 4], [6, 3])
EXACT = {"rtol": 1e-9, "atol": 1e-12}
STEPS = 2
KINDS = ("ddp", "fsdp2")


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny().double()


def transforms() -> list[Transform]:
    return [isopo(overlap="all", reg=0.5, q=-0.5), isopo_ntk(rho=0.5)]


def block(model: torch.nn.Module, transform: Transform, rank: int, factor: float = 1.0) -> None:
    ids, seq = padded(LENGTHS[rank], 13, seed=rank)
    with transform.applied(model, sequences=seq, advantages=A[rank]):
        (factor * nll(model(ids, seq), ids, seq).sum()).backward()


def alone(transform: Transform) -> list[dict[str, Tensor]]:
    """One process, one micro-batch after the other; gradients averaged over the two."""
    model, steps = tiny(), []
    for _ in range(STEPS):
        model.zero_grad()
        for rank in range(2):
            block(model, transform, rank)
        transform.step()
        steps.append({name: p.grad / 2 for name, p in model.named_parameters()})
    return steps


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def wrapped(kind: str) -> torch.nn.Module:
    model = tiny()
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in (model.up, model.down):
        fully_shard(layer)
    return fully_shard(model)


def together(model: torch.nn.Module, transform: Transform, rank: int) -> list[dict[str, Tensor]]:
    """What one of two processes holds after each step."""
    steps = []
    for _ in range(STEPS):
        model.zero_grad()
        block(model, transform, rank)
        transform.step()
        names = (name.removeprefix("module.") for name, _ in model.named_parameters())
        steps.append({name: whole(p.grad) for name, p in zip(names, model.parameters())})
    return steps


def kept_forward(rank: int, keep: bool) -> tuple[str, dict[str, Tensor]]:
    """What DDP gets where a forward beside the loss is kept or dropped: an error, or gradients."""
    model = DistributedDataParallel(tiny(), find_unused_parameters=True)
    ids, seq = padded(LENGTHS[rank], 13, seed=rank)
    message = ""
    try:
        with isopo(overlap="all").applied(model, sequences=seq, advantages=A[rank]):
            kept = [model(ids, seq)] if keep else [bool(model(ids, seq).any())]
            nll(model(ids, seq), ids, seq).sum().backward()
            assert kept
    except ProxpoError as error:
        message = str(error)
    return message, {name: p.grad for name, p in model.module.named_parameters()}


def one_spoilt(rank: int, transform: Transform) -> list[dict[str, Any]]:
    """States of a transform around an update that is not finite on the first process alone."""
    model, states = tiny(), []
    for factor in (1.0, torch.nan if rank == 0 else 1.0, 1.0):
        with suppress(NotFiniteError):
            block(model, transform, rank, factor)
        model.zero_grad()
        transform.step()
        states.append(transform.state_dict())
    return states


def work(rank: int, folder: str) -> None:
    spoilt = [one_spoilt(rank, transform) for transform in (*transforms(), proma())]
    torch.save(spoilt, f"{folder}/spoilt-{rank}.pt")
    torch.save([kept_forward(rank, keep) for keep in (True, False)], f"{folder}/kept-{rank}.pt")
    for kind in KINDS:
        for number, transform in enumerate(transforms()):
            steps = together(wrapped(kind), transform, rank)
            torch.save([steps, transform.state_dict()], f"{folder}/{kind}-{number}-{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("ranks"))
    two_processes.run(work, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 1])
def test_two_processes_equal_one(results, kind, number):
    transform = transforms()[number]
    want = alone(transform)
    for rank in range(2):
        steps, state = torch.load(f"{results}/{kind}-{number}-{rank}.pt", weights_only=True)
        assert_close(steps, want, **EXACT)
        assert state.keys() == transform.state_dict().keys()
        for key, value in transform.state_dict().items():
            assert_close(torch.as_tensor(state[key]), torch.as_tensor(value), **EXACT)


def test_a_kept_forward_does_not_pass_by_the_other_process(results):
    """Its backward never comes, so what waits for it would be added after the reduction."""
    model = tiny()
    for rank in range(2):
        block(model, isopo(overlap="all"), rank)
    want = {name: p.grad / 2 for name, p in model.named_parameters()}
    for rank in range(2):
        kept, dropped = torch.load(f"{results}/kept-{rank}.pt", weights_only=True)
        assert "never reached backward()" in kept[0]
        assert "under torch.no_grad() or outside the block" in kept[0]
        assert not dropped[0]
        assert_close(dropped[1], want, **EXACT)


def test_an_update_that_one_process_cannot_make_is_made_by_none(results):
    """The averages stay as they were on both, which hold the same ones after the next update."""
    ranks = [torch.load(f"{results}/spoilt-{rank}.pt", weights_only=True) for rank in range(2)]
    assert_close(ranks[0], ranks[1], rtol=0, atol=0)
    for first, second, third in ranks[0]:
        assert_close(second, first, rtol=0, atol=0)
        assert third["steps"] == 2
