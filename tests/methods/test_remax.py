import pytest
import torch
from helpers import advantages, close, make_batch, method, outcome_only, per_row, policy_gradient

from methods._case import Case
from methods.loops import bounded, number, returns, row, score, token_mean, token_rewards, tokens
from proxpo import Batch


def remax(b: Batch) -> torch.Tensor:
    a = returns(token_rewards(b, kl_coef=0.1), b)
    a = {(i, t): v - number(b.greedy_rewards[i]) for (i, t), v in a.items()}
    return token_mean(score(a, b), b)


def remax_official(b: Batch) -> torch.Tensor:
    a = {}
    for i, t in tokens(b):
        ts = row(b, i)
        gain = bounded(number(b.rewards[i]) - number(b.greedy_rewards[i]), -0.6, 0.6)
        kl = number(b.old_logp[i, t]) - number(b.ref_logp[i, t])
        a[i, t] = 0.99 ** (len(ts) - ts.index(t)) * gain - 0.05 * kl
    return token_mean(score(a, b), b)


CASES = {
    "remax": Case("remax", {"kl_coef": 0.1}, remax),
    "remax-official": Case(
        "remax", {"form": "official", "kl_coef": 0.05, "reward_clip": 0.6}, remax_official
    ),
}


@pytest.mark.checks("remax", "β = 0, γ = 1: A = r - b on every token")
def test_reward_minus_greedy_reward() -> None:
    batch = outcome_only(make_batch(1))
    a = per_row(advantages(method("remax"), batch), batch)
    close(a, batch.rewards - batch.greedy_rewards)


@pytest.mark.checks("remax", "a constant added to sampled and greedy rewards changes nothing")
@pytest.mark.parametrize("form", ["framework", "official"])
def test_common_shift(form: str) -> None:
    batch = make_batch(1)
    moved = batch.replace(rewards=batch.rewards + 4, greedy_rewards=batch.greedy_rewards + 4)
    made = method("remax", form=form, kl_coef=0.1)
    close(advantages(made, moved), advantages(made, batch))


@pytest.mark.checks("remax", "dloss/dlogp = -A/N")
@pytest.mark.parametrize("form", ["framework", "official"])
def test_gradient(form: str) -> None:
    batch, made = make_batch(1), method("remax", form=form)
    close(policy_gradient(made, batch), -advantages(made, batch) / batch.mask.sum())


@pytest.mark.checks("remax", "official form: A_{t+1}/A_t = 1/γ, the last token carries one γ")
def test_official_discount() -> None:
    batch = make_batch(1, holes=False)
    a = advantages(method("remax", form="official"), batch)
    gain = batch.rewards - batch.greedy_rewards
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        close(a[i, 1:length], a[i, : length - 1] / 0.99)
        close(a[i, length - 1], 0.99 * gain[i])


def test_official_kl_is_not_accumulated() -> None:
    """The framework form sums the KL to the end of the response; the repository does not."""
    batch = outcome_only(make_batch(1))
    batch = batch.replace(greedy_rewards=batch.rewards)
    kl = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0.0)
    close(advantages(method("remax", form="official", kl_coef=0.5), batch), -0.5 * kl)
    suffix = torch.where(batch.mask, kl.flip(1).cumsum(1).flip(1), 0.0)
    close(advantages(method("remax", kl_coef=0.5), batch), -0.5 * suffix)
    assert not torch.allclose(kl, suffix)


@pytest.mark.checks("remax", "one baseline for all samples of a prompt, which need not sum to 0")
def test_not_centred() -> None:
    batch = outcome_only(make_batch(1))
    a = per_row(advantages(method("remax"), batch), batch)
    base = (batch.rewards - a).view(3, 3)
    close(base, base[:, :1].expand(3, 3))
    assert a.view(3, 3).sum(1).abs().min() > 1e-3


def test_missing_greedy_rewards_are_an_error() -> None:
    with pytest.raises(ValueError, match="greedy_rewards"):
        advantages(method("remax"), make_batch(1).replace(greedy_rewards=None))
