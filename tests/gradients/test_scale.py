"""ISOPO's scale: the formula, its limits, and that every path calls it."""

import importlib

import pytest
import slow
import torch
from models import Tiny, nll, padded
from torch.testing import assert_close

from proxpo.gradients import isopo
from proxpo.gradients.isopo import power, ratio2, reg2, scale
from proxpo.logp import token_logp

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.checks("isopo", "keep_small is the paper's form divided by sqrt(rho E)")
def test_keep_small():
    x2, mean2 = torch.rand(6).double(), torch.tensor(0.3).double()
    for rho, eps in ((0.5, 0.0), (2.0, 1e-3)):
        paper = reg2(x2, rho, mean2, eps=eps)
        kept = reg2(x2, rho, mean2, eps=eps, keep_small=True)
        assert_close(kept.sqrt(), paper.sqrt() / (rho * mean2).sqrt(), **EXACT)
    short = reg2(torch.tensor([1e-20]).double(), 0.5, mean2, eps=0.0, keep_small=True)
    assert_close(power(short, -1.0), torch.ones(1).double(), **EXACT)


def test_zero_lengths_stay_finite():
    zero = torch.zeros(2).double()
    base = reg2(zero, 0.0, None, eps=0.0)
    assert_close(power(base, -1.0), torch.ones(2).double())
    base = reg2(zero, 1.0, zero.mean(), eps=0.0, keep_small=True)
    assert_close(power(base, -2.0), torch.ones(2).double())
    assert_close(ratio2(zero, zero), zero)


@pytest.mark.parametrize("keep_small", [False, True])
@pytest.mark.parametrize("times", [None, torch.tensor([0.5, -2.0, 1.0, 3.0]).double()])
def test_the_scale_is_the_product_of_powers(keep_small, times):
    f2, share = torch.rand(2, 4).double()
    n2 = f2 / share
    options = {"p": -0.7, "q": -0.3, "r": -1.2, "eps": 1e-3, "keep_small": keep_small}
    rhos, means = (0.2, 0.4, 0.6), tuple(torch.tensor([0.3, 0.9, 0.5]).double())
    s = scale(f2, n2, reg=rhos, mean=means, times=times, **options)
    want = torch.ones(4).double() if times is None else times
    for x2, letter, rho, mean in zip((f2, n2, f2 / n2), "pqr", rhos, means):
        want = want * slow.reg2(x2.sqrt(), rho, mean, 1e-3, keep_small) ** options[letter]
    assert_close(s, want, **EXACT)


def test_the_first_average_is_the_mean_or_ones_own():
    x2 = torch.rand(5).double()
    one = {"p": -1.0, "q": 0.0, "r": 0.0, "reg": (0.5, 0.0, 0.0)}
    assert_close(scale(x2, None, **one), (x2 + 0.5 * x2.mean()) ** -0.5, **EXACT)
    assert_close(scale(x2, None, history="own", **one), (1.5 * x2) ** -0.5, **EXACT)


def test_an_undefined_fisher_length_leaves_the_norm_alone():
    f2, n2 = torch.zeros(3).double(), torch.rand(3).double()
    s = scale(f2, n2, p=-1.0, q=-1.0, r=-2.0, defined=torch.tensor(False))
    assert_close(s, n2**-0.5, **EXACT)


@pytest.mark.parametrize("path", ["gram", "materialise", "stream"])
@pytest.mark.parametrize("fused", [False, True])
def test_every_layer_and_the_head_call_the_scale(path, fused, monkeypatch):
    torch.manual_seed(0)
    model, calls = Tiny(), []
    module = importlib.import_module("proxpo.gradients.isopo")

    def counted(*args, **kwargs):
        calls.append(args)
        return scale(*args, **kwargs)

    monkeypatch.setattr(module, "scale", counted)
    ids, seq = padded([5, 3], 13)
    same = seq[:, :, None] == seq[:, None, :]
    allowed = same & torch.ones(5, 5, dtype=torch.bool).tril()
    transform = isopo(preset="figure4", overlap="all", path=path)
    with transform.applied(model, sequences=seq, advantages=torch.ones(2)) as session:
        if fused:
            hidden = model.block(model.embed(ids), allowed)
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[:, :-1] = same[:, 0, 1:] & (seq[:, 1:] >= 0)
            logp = token_logp(hidden, model.head.weight, ids.roll(-1, 1), mask=mask)
            (-logp).sum().backward()
        else:
            nll(model(ids, seq), ids, seq).sum().backward()
    assert len(calls) >= len(session.handles)
