import pytest
import torch
from helpers import advantages, close, f64, make_batch, method, on_policy, per_row, policy_gradient

from methods._case import Case
from methods.loops import Numbers, clipped, everywhere, groups, ratio, row, token_mean
from methods.toy_updates import ToyUpdates, run
from proxpo import Batch


def opo_advantages(b: Batch) -> Numbers:
    r, out = b.rewards.tolist(), {}
    for members in groups(b).values():
        length = {i: len(row(b, i)) for i in members}
        base = sum(length[i] * r[i] for i in members) / sum(length.values())
        out |= {i: r[i] - base for i in members}
    return everywhere(out, b)


CASES = {
    "opo": Case("opo", {}, lambda b: token_mean(clipped(ratio(b), opo_advantages(b), 0.2, 0.2), b)),
}


@pytest.mark.checks("opo", "Σ L_i A_i = 0 per group; equal lengths give the centred reward")
def test_length_weighted_sum_is_zero() -> None:
    batch = make_batch(1)
    a = per_row(advantages(method("opo"), batch), batch)
    lengths = batch.mask.sum(1)
    close((lengths * a).view(3, 3).sum(1), torch.zeros(3))
    assert a.view(3, 3).sum(1).abs().max() > 1e-2  # a plain mean would make this 0 instead
    even = batch.replace(mask=torch.ones_like(batch.mask))
    close(advantages(method("opo"), even), advantages(method("dr-grpo"), even))


@pytest.mark.checks("opo", "token mean at r = 1: gradient -A/N, which sums to 0 over a group")
def test_gradient_sums_to_zero() -> None:
    batch = on_policy(make_batch(1))
    grad = policy_gradient(method("opo"), batch)
    close(grad, -advantages(method("opo"), batch) / batch.mask.sum())
    close(grad.view(3, -1).sum(1), torch.zeros(3))


@pytest.mark.checks("opo", "shift-invariant, linear in rewards, permuted with its rows")
def test_shift_scale_permutation() -> None:
    batch, made = make_batch(1), method("opo")
    a = advantages(made, batch)
    close(advantages(made, batch.replace(rewards=2 * batch.rewards - 5)), 2 * a)
    order = torch.tensor([2, 0, 1, 3, 5, 4, 8, 7, 6])
    close(advantages(made, batch.rows(order)), a[order])


@pytest.mark.checks("opo", "a longer response pulls the baseline towards its reward")
def test_length_moves_the_baseline() -> None:
    batch = make_batch(1, groups=1, size=2, tokens=8, holes=False)
    batch = batch.replace(rewards=f64([1.0, 0.0]))

    def baseline(first: int) -> float:
        mask = torch.arange(8) < torch.tensor([[first], [4]])
        sized = batch.replace(mask=mask)
        return float(1.0 - per_row(advantages(method("opo"), sized), sized)[0])

    assert baseline(2) == pytest.approx(2 / 6)
    assert baseline(4) == pytest.approx(4 / 8)
    assert baseline(8) == pytest.approx(8 / 12)


def test_group_of_one_keeps_its_reward_and_one_update_is_scheduled() -> None:
    batch = make_batch(1, groups=3, size=1)
    close(per_row(advantages(method("opo"), batch), batch), batch.rewards)
    updates = ToyUpdates(count=4, parts=2)
    run(method("opo"), updates)
    assert updates.calls == [("step", 1, 1, True)]
