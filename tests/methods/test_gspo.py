from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    advantages,
    close,
    crafted,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    policy_gradient,
)

from methods._case import Case
from methods.loops import (
    Terms,
    clipped,
    exp,
    number,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_ratio,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.ratio import sequence
from proxpo.types import Context


def gspo(b: Batch, average: Callable[[Terms, Batch], Any]) -> torch.Tensor:
    return average(clipped(sequence_ratio(b), z_scores(b), 0.03, 0.04), b)


def gspo_token(b: Batch) -> torch.Tensor:
    s = {
        (i, t): number(v) * exp(b.logp[i, t] - number(b.logp[i, t]))
        for (i, t), v in sequence_ratio(b).items()
    }
    return seq_mean_token_mean(clipped(s, z_scores(b), 0.03, 0.04), b)


CASES = {
    "gspo": Case(
        "gspo", {"clip_low": 0.03, "clip_high": 0.04}, lambda b: gspo(b, seq_mean_token_mean)
    ),
    "gspo-token": Case(
        "gspo", {"variant": "token", "clip_low": 0.03, "clip_high": 0.04}, gspo_token
    ),
    "gspo-luspo": Case(
        "gspo",
        {"variant": "luspo", "clip_low": 0.03, "clip_high": 0.04},
        lambda b: gspo(b, seq_mean_token_sum),
    ),
}


WIDE = {"clip_low": 5.0, "clip_high": 5.0}


def row_ratio(batch: object) -> torch.Tensor:
    return sequence().apply(batch, Context())[0][:, 0]


@pytest.mark.checks("gspo", "A constant in a response: GSPO-token agrees in loss and gradient")
@pytest.mark.parametrize("bounds", [WIDE, {"clip_low": 0.03, "clip_high": 0.04}])
def test_token_form(bounds: dict) -> None:
    batch = make_batch(1)
    whole, token = (method("gspo", variant=v, **bounds) for v in ("sequence", "token"))
    (a, ga), (b, gb) = (loss_and_gradients(made, batch) for made in (whole, token))
    close(a, b)
    close(ga, gb)


def test_token_form_gives_each_token_its_own_advantage() -> None:
    """With advantages per token the two differ: only the token form keeps them apart."""
    batch = crafted([[0.1, 0.1]], [[1.0, -2.0]])
    s = f64(0.1).exp()
    token = policy_gradient(method("gspo", variant="token", **WIDE), batch)
    close(token, f64([[-0.5, 1.0]]) * s)
    close(policy_gradient(method("gspo", **WIDE), batch), f64([[0.25, 0.25]]) * s)


@pytest.mark.checks("gspo", "inside the clip: -A·s/(B·L_i), the same for all tokens of a row")
def test_gradient_inside() -> None:
    batch, made = make_batch(1), method("gspo", **WIDE)
    d = torch.where(batch.mask, batch.logp - batch.old_logp, 0.0)
    lengths = batch.mask.sum(1, keepdim=True)
    s = (d.sum(1, keepdim=True) / lengths).exp()
    close(policy_gradient(made, batch), -advantages(made, batch) * s / (9 * lengths))


@pytest.mark.checks("gspo", "a clipped row is silent, tokens with ratio 1 included")
def test_whole_row_is_clipped() -> None:
    batch = crafted([[0.0, 0.3], [0.0, 0.3]], [1.0, -1.0])
    found = policy_gradient(method("gspo"), batch)
    assert found[0].eq(0).all()
    assert found[1].ne(0).all()
    assert policy_gradient(method("grpo"), batch)[0, 0] != 0


@pytest.mark.checks("gspo", "one token per row: GRPO's clip")
def test_single_tokens() -> None:
    batch = crafted([[0.3], [-0.4], [0.1]], [1.0, -1.0, 2.0])
    made = method("gspo", clip_low=0.2, clip_high=0.2)
    close(policy_gradient(made, batch), policy_gradient(method("grpo"), batch))


@pytest.mark.checks("gspo", "s ignores the order of the log-ratios and is e^d for a constant d")
def test_geometric_mean() -> None:
    s = row_ratio(crafted([[0.3, -0.1, 0.4], [0.4, 0.3, -0.1]], [1.0, 1.0]))
    close(s[0], s[1])
    close(s[0], f64(0.2).exp())
    mask = [[1, 0, 0, 0], [1, 1, 1, 1]]
    close(row_ratio(crafted([[0.25] * 4] * 2, [1.0, 1.0], mask=mask)), f64(0.25).exp(),
          rtol=1e-7)  # fmt: skip


def test_luspo_multiplies_each_row_by_its_length() -> None:
    batch = make_batch(1)
    base = policy_gradient(method("gspo", **WIDE), batch)
    luspo = policy_gradient(method("gspo", variant="luspo", **WIDE), batch)
    close(luspo, base * batch.mask.sum(1, keepdim=True))


def test_empty_row_is_not_counted() -> None:
    batch = crafted([[0.1, 0.1], [0.2, 0.2]], [1.0, 1.0], mask=[[1, 1], [0, 0]])
    value, grads = loss_and_gradients(method("gspo", **WIDE), batch)
    close(value, -f64(0.1).exp())
    assert grads["logp"][1].eq(0).all()


def test_defaults_are_the_papers() -> None:
    assert method("gspo").trust.options["clip_low"] == 3e-4
    assert method("gspo").trust.options["clip_high"] == 4e-4
