import pytest
import torch
from helpers import advantages, close, f64, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    clipped,
    gae,
    mean,
    number,
    plus,
    ratio,
    token_mean,
    token_rewards,
    tokens,
    value_terms,
    whitened,
)
from proxpo import Batch
from proxpo.ops.kl import kl_exact
from proxpo.stages.reward import span_values


def span_rewards(b: Batch, kl: Numbers, coef: float) -> Numbers:
    return {k: number(b.span_rewards[k]) - coef * kl[k] for k in tokens(b)}


def gae_to_hole(rho: Numbers, b: Batch, *, lam: float) -> Numbers:
    """Column by column from the right; a masked column sets the recursion back."""
    out: Numbers = {}
    for i in range(len(b.mask)):
        value_next = advantage_next = 0.0
        for t in reversed(range(b.mask.shape[1])):
            if not b.mask[i, t]:
                value_next = advantage_next = 0.0
                continue
            value = number(b.old_values[i, t])
            advantage_next = out[i, t] = rho[i, t] + value_next - value + lam * advantage_next
            value_next = value
    return out


def text2grad(b: Batch) -> torch.Tensor:
    kl = {k: number(b.ref_kl[k]) for k in tokens(b)}
    raw = gae_to_hole(span_rewards(b, kl, 0.2), b, lam=0.95)
    x = clipped(ratio(b), whitened(raw), 0.2, 0.2)
    return token_mean(plus(x, (0.1, value_terms(b, raw, clip=0.2))), b)


def text2grad_raw(b: Batch) -> torch.Tensor:
    d = {k: number(b.old_logp[k]) - number(b.ref_logp[k]) for k in tokens(b)}
    rho = span_rewards(b, {k: x * x / 2 for k, x in d.items()}, 0.5)
    for k, kept_reward in token_rewards(b).items():
        rho[k] += kept_reward
    raw = gae(rho, b, gamma=0.9, lam=0.8)
    x = plus(clipped(ratio(b), raw, 0.2, 0.2), (0.1, value_terms(b, raw, clip=0.2)))
    too_far = mean([number(r) for r in ratio(b).values()]) > 1.5
    return token_mean(x, b) * (0.0 if too_far else 1.0)


CASES = {
    "text2grad": Case("text2grad", {}, text2grad),
    "text2grad-raw": Case(
        "text2grad",
        {
            "gamma": 0.9,
            "lam": 0.8,
            "whitening": False,
            "holes": "skip",
            "kl": "k2",
            "kl_coef": 0.5,
            "outcome": True,
            "max_ratio": 1.5,
        },
        text2grad_raw,
    ),
}


def raw(batch: Batch, **options: object) -> torch.Tensor:
    made = method("text2grad", whitening=False, kl_coef=0.0, **options)
    return advantages(made, batch)


def without_values(batch: Batch) -> Batch:
    zero = torch.zeros_like(batch.logp)
    return batch.replace(values=zero, old_values=zero)


@pytest.fixture
def batch() -> Batch:
    return make_batch(1, holes=False)


@pytest.mark.checks("text2grad", "δ = 0, b = 0, V = 0: A = 0 and no policy gradient")
def test_nothing_marked(batch: Batch) -> None:
    blank = without_values(batch).replace(span_rewards=torch.zeros_like(batch.logp))
    made = method("text2grad", kl_coef=0.0)
    close(advantages(made, blank), 0 * batch.logp, atol=0.0)
    assert policy_gradient(made, blank).eq(0).all()


@pytest.mark.checks("text2grad", "λ = 0, V = 0, b = 0: A is δ")
def test_lambda_zero(batch: Batch) -> None:
    found = raw(without_values(batch), lam=0.0)
    close(found, torch.where(batch.mask, batch.span_rewards, 0.0))


@pytest.mark.checks("text2grad", "γ = λ = 1, V = 0, b = 0: A is the sum of δ to the end")
def test_lambda_one(batch: Batch) -> None:
    delta = torch.where(batch.mask, batch.span_rewards, 0.0)
    to_go = torch.where(batch.mask, delta.flip(1).cumsum(1).flip(1), 0.0)
    close(raw(without_values(batch), lam=1.0), to_go)


@pytest.mark.checks(
    "text2grad", "whitened A: mean 0, variance 1; rewards on padding change nothing"
)
def test_whitening(batch: Batch) -> None:
    made = method("text2grad")
    found = advantages(made, batch)
    assert abs(float(found[batch.mask].mean())) < 1e-12
    assert float(found[batch.mask].var()) == pytest.approx(1.0, abs=1e-7)
    spoilt = torch.where(batch.mask, batch.span_rewards, 1e9)
    close(advantages(made, batch.replace(span_rewards=spoilt)), found)


@pytest.mark.checks("text2grad", "a negative span lowers A on its tokens and before, never behind")
def test_a_bad_span(batch: Batch) -> None:
    row = int(batch.mask.sum(1).argmax())
    last = int(batch.mask[row].sum()) - 1
    assert last >= 3
    marked = batch.span_rewards.clone()
    marked[row, last - 1] -= 1
    moved = raw(batch.replace(span_rewards=marked)) - raw(batch)
    assert moved[row, last - 1] == pytest.approx(-1.0)
    assert (moved[row, : last - 1] < 0).all()
    close(moved[row, last:], 0 * moved[row, last:], atol=0.0)
    others = torch.arange(len(moved)) != row
    close(moved[others], 0 * moved[others], atol=0.0)


@pytest.mark.checks("text2grad", "c = 0: the clipped PPO policy loss on these advantages")
def test_without_a_critic_loss(batch: Batch) -> None:
    made = method("text2grad", value_coef=0.0)
    value, grads = loss_and_gradients(made, batch)
    given = batch.replace(advantages=advantages(made, batch), values=None)
    expected, expected_grads = loss_and_gradients(method("ppo").replace(value=None), given)
    close(value, expected)
    close(grads["logp"], expected_grads["logp"])


def test_no_credit_crosses_a_hole() -> None:
    batch = make_batch(1, groups=1, size=1, tokens=5)
    mask = torch.tensor([[1, 1, 0, 1, 1]]).bool()
    batch = without_values(batch).replace(mask=mask, span_rewards=f64([[0, 0, 5, 0, -1]]))
    close(raw(batch, lam=1.0), f64([[0, 0, 0, -1, -1]]))
    close(raw(batch, lam=1.0, holes="skip"), f64([[-1, -1, 0, -1, -1]]))
    close(raw(batch, lam=0.5), f64([[0, 0, 0, -0.5, -1]]))
    valued = batch.replace(old_values=f64([[1, 2, 9, 3, 4]]))
    close(raw(valued, lam=0.0), f64([[1, -2, 0, 1, -5]]))


def test_kl_enters_the_reward(batch: Batch) -> None:
    made = method("text2grad", whitening=False, kl_coef=0.3, lam=0.0, kl="abs")
    found = advantages(made, without_values(batch))
    kl = (batch.old_logp - batch.ref_logp).abs()
    close(found, torch.where(batch.mask, batch.span_rewards - 0.3 * kl, 0.0))
    state = made.update_state(made.init_state(), batch, proxpo.prepare(made, batch).metrics)
    assert float(state["reward.kl_in_reward"]["coef"]) != 0.3  # adaptive as it comes


@pytest.mark.checks("text2grad", "the KL in the reward runs over the whole vocabulary by default")
def test_kl_over_the_vocabulary(batch: Batch) -> None:
    """`ref_kl` is KL(π_old‖π_ref); neither policy's number of the drawn token is read."""
    made = method("text2grad", whitening=False, lam=0.0)
    kl = kl_exact(batch.old_vocab_logp, batch.vocab_logp)
    there = without_values(batch).replace(ref_kl=kl)
    found = advantages(made, there)
    close(found, torch.where(batch.mask, batch.span_rewards - 0.2 * kl, 0.0))
    moved = there.replace(ref_logp=batch.ref_logp - 1)
    close(advantages(made, moved), found, atol=0.0)
    with pytest.raises(proxpo.ProxpoError, match=r"'ref_kl' .*trainer's pass of both policies"):
        proxpo.loss_fn(made)(batch.replace(ref_kl=None))
    with pytest.raises(proxpo.ProxpoError, match="clamp=verl bounds an estimate"):
        method("ppo", kl_coef=0.1, **{"reward": {"name": "kl_in_reward", "estimator": "full",
                                                 "clamp": "verl"}})  # fmt: skip


def test_a_step_too_far_off_counts_for_nothing(batch: Batch) -> None:
    far = batch.replace(old_logp=batch.logp - 2.5)  # a mean ratio of 12.2
    value, grads = loss_and_gradients(method("text2grad"), far)
    assert value == 0
    assert all(grad.eq(0).all() for grad in grads.values())
    near = batch.replace(old_logp=batch.logp - 2.2)  # 9.0
    assert loss_and_gradients(method("text2grad"), near)[1]["values"].any()
    assert loss_and_gradients(method("text2grad", max_ratio=None), far)[1]["values"].any()


def test_outcome(batch: Batch) -> None:
    bare = without_values(batch).replace(token_rewards=None)
    plain, kept = raw(bare, lam=1.0), raw(bare, lam=1.0, outcome=True)
    close(kept - plain, torch.where(batch.mask, batch.rewards[:, None], 0.0))


def test_what_is_missing_is_said(batch: Batch) -> None:
    with pytest.raises(proxpo.ProxpoError, match=r"'span_rewards'.*proxpo.stages.reward.spans"):
        proxpo.loss_fn(method("text2grad"))(batch.replace(span_rewards=None))
    spared = batch.replace(rewards=None)
    close(advantages(method("text2grad"), spared), advantages(method("text2grad"), batch))


# Spans --------------------------------------------------------------------------------------------


def test_overlaps_gaps_and_the_variant_for_code() -> None:
    text = "x = 1\ny = 2"
    offsets = [(0, 5), (5, 6), (6, 11), (11, 11)]
    marks = [("x = 1", 1.0), ("x = 1", -1.0), ("y = 2", 0.0)]
    close(span_values(text, offsets, marks), f64([-1, 0, 0, 0]))
    close(span_values(text, offsets, marks, unmarked=1.0), f64([-1, 1, 0, 1]))
    with pytest.raises(proxpo.ProxpoError, match=r"token at \[9, 12\) lies outside"):
        span_values(text, [(9, 12)], marks)
