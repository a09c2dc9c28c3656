"""A block of a transform on a padded batch, and the gradients it leaves."""

import torch
from models import nll
from torch import Tensor
from torch.testing import assert_close

from proxpo.gradients import isopo

A = torch.tensor([1.0, -0.6, 0.3]).double()
LENGTHS = [5, 7, 4]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def backward(model, ids, seq, transform=None, advantages=A, forward=None) -> dict[str, Tensor]:
    """p.grad after one block, from zero."""
    model.zero_grad()
    transform = isopo(overlap="all") if transform is None else transform
    with transform.applied(model, sequences=seq, advantages=advantages):
        logits = model(ids, seq) if forward is None else forward()
        nll(logits, ids, seq).sum().backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return actual


def assert_same(actual: dict[str, Tensor], want: dict[str, Tensor], **tolerance) -> None:
    assert actual.keys() == want.keys()
    for name in actual:
        assert_close(actual[name], want[name], **(tolerance or EXACT), msg=lambda m, n=name: n + m)
