import pytest
import torch
from helpers import (
    advantages,
    close,
    loss_and_gradients,
    make_batch,
    method,
    pad_columns,
    per_row,
    policy_gradient,
)

from methods._case import Case
from methods.loops import centred, clipped, everywhere, ratio
from proxpo import Batch
from proxpo.settings import at_length


def dr_grpo(b: Batch, *, length: float, drop_truncated: bool = False) -> torch.Tensor:
    x = clipped(ratio(b), everywhere(centred(b), b), 0.2, 0.2)
    total = sum(v for (i, _), v in x.items() if not (drop_truncated and b.truncated[i]))
    return total / length / len(b.mask)


CASES = {
    "dr-grpo": Case("dr-grpo", {}, lambda b: dr_grpo(b, length=3000)),
    "dr-grpo-truncated": Case(
        "dr-grpo",
        {"ignore_truncated": True, "max_tokens": 9},
        lambda b: dr_grpo(b, length=9, drop_truncated=True),
    ),
}


@pytest.mark.checks("dr-grpo", "dloss/dlogp = -A·r/(B·L_max) where live, whatever the length")
def test_weight_does_not_know_the_length() -> None:
    batch = make_batch(1, spread=0.05)
    made = method("dr-grpo", max_tokens=50, clip_low=5.0, clip_high=5.0)
    r = (batch.logp - batch.old_logp).exp()
    close(policy_gradient(made, batch), -advantages(made, batch) * r / (9 * 50))


@pytest.mark.checks("dr-grpo", "advantages of a group sum to 0; times G/(G-1) they are RLOO's")
def test_advantages() -> None:
    batch = make_batch(1)
    a = per_row(advantages(method("dr-grpo"), batch), batch)
    close(a.view(3, 3).sum(1), torch.zeros(3))
    close(1.5 * a, per_row(advantages(method("rloo", kl_coef=0.0), batch), batch))


@pytest.mark.checks("dr-grpo", "twice L_max halves loss and gradient; padding changes nothing")
def test_constant_not_width() -> None:
    batch = make_batch(1)
    value, grads = loss_and_gradients(method("dr-grpo", max_tokens=10), batch)
    half, half_grads = loss_and_gradients(method("dr-grpo", max_tokens=20), batch)
    close(half, value / 2)
    close(half_grads["logp"], grads["logp"] / 2)
    wide, _ = loss_and_gradients(method("dr-grpo", max_tokens=10), pad_columns(batch, 4))
    close(wide, value)
    width = batch.mask.shape[1]  # dividing by the padded width, the wrong variant, would move
    assert abs(value * 10 / width - value * 10 / (width + 4)) > 1e-3


@pytest.mark.checks("dr-grpo", "equal lengths L = L_max: both other averages agree")
def test_equal_lengths() -> None:
    batch = make_batch(1)
    batch = batch.replace(mask=torch.ones_like(batch.mask))
    value, _ = loss_and_gradients(method("dr-grpo", max_tokens=6), batch)
    for average in ("seq_mean_token_mean", "token_mean"):
        close(loss_and_gradients(method("dr-grpo", aggregate=average), batch)[0], value)


@pytest.mark.checks("dr-grpo", "rewards times c scale the gradient by c; GRPO's does not change")
def test_reward_scale() -> None:
    batch = make_batch(1)
    scaled = batch.replace(rewards=4 * batch.rewards)
    dr, grpo = method("dr-grpo"), method("grpo", eps=0.0)
    close(policy_gradient(dr, scaled), 4 * policy_gradient(dr, batch))
    close(policy_gradient(grpo, scaled), policy_gradient(grpo, batch))


def test_truncated_rows_are_silent_but_counted() -> None:
    batch = make_batch(1)
    batch = batch.replace(truncated=torch.arange(9) < 3)
    kept = policy_gradient(method("dr-grpo"), batch)
    found = policy_gradient(method("dr-grpo", ignore_truncated=True), batch)
    close(found[:3], torch.zeros(3, 6))
    close(found[3:], kept[3:])  # the same B: a mean over the remaining rows would differ


def test_the_divisor_is_the_hosts_length_unless_set() -> None:
    """Without a host the official 3000; the same inside CAPO, and in the recipe of a swap."""
    batch = make_batch(1)
    official, fitted = method("dr-grpo"), at_length(method("dr-grpo"), 6)
    close(loss_and_gradients(fitted, batch)[0], 500 * loss_and_gradients(official, batch)[0])
    own = method("dr-grpo", max_tokens=50)
    assert at_length(own, 6) == own
    swapped = method("grpo", aggregate={"name": "constant_length", "max_tokens": None})
    assert at_length(swapped, 6).aggregate.options["max_tokens"] == 6
    hosted = at_length(method("capo", host="dr-grpo"), 6)
    assert hosted.aggregate == fitted.aggregate
    assert at_length(official, None) is official
