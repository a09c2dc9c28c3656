import math

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
    on_policy,
    outcome_only,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import (
    clipped,
    entropies,
    gae,
    plus,
    ratio,
    token_mean,
    token_rewards,
    value_terms,
    whitened,
)
from proxpo import Batch
from proxpo.errors import ProxpoError
from proxpo.stages.advantage import raw_gae
from proxpo.stages.advantage import token_rewards as rewards_on_tokens


def ppo(
    b: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl_coef: float = 0.0,
    whiten: bool = True,
    value_clip: float = 0.5,
    value_coef: float = 1.0,
    entropy_coef: float = 0.0,
    dual: float = math.inf,
) -> torch.Tensor:
    raw = gae(token_rewards(b, kl_coef=kl_coef), b, gamma=gamma, lam=lam)
    x = clipped(ratio(b), whitened(raw) if whiten else raw, 0.2, 0.2, dual=dual)
    x = plus(x, (-entropy_coef, entropies(b)), (value_coef, value_terms(b, raw, clip=value_clip)))
    return token_mean(x, b)


CASES = {
    "ppo": Case("ppo", {}, ppo),
    "ppo-full": Case(
        "ppo",
        {
            "dual": 1.5,
            "gamma": 0.95,
            "lam": 0.9,
            "kl_coef": 0.1,
            "kl_controller": "horizon",
            "entropy_coef": 0.01,
            "value_clip": 0.2,
            "value_coef": 0.1,
        },
        lambda b: ppo(
            b,
            gamma=0.95,
            lam=0.9,
            kl_coef=0.1,
            value_clip=0.2,
            value_coef=0.1,
            entropy_coef=0.01,
            dual=1.5,
        ),
    ),
    "ppo-raw": Case(
        "ppo",
        {"whitening": False, "value_clip": None},
        lambda b: ppo(b, whiten=False, value_clip=math.inf),
    ),
}


RATIOS = f64([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.9, 3.1])


def gradient_weights(sign: float, **options: object) -> torch.Tensor:
    """-dx/dlogp / A for the ratios above."""
    batch = crafted([RATIOS.log().tolist()], [sign])
    return -policy_gradient(method("ppo", **options), batch)[0] * len(RATIOS) / sign


@pytest.mark.checks("ppo", "dx/dlogp = -A·r where live; 0 if A > 0, r > 1+ε or A < 0, r < 1-ε")
def test_live_and_clipped() -> None:
    close(gradient_weights(1.0), RATIOS * (RATIOS < 1.2))
    close(gradient_weights(-1.0), RATIOS * (RATIOS > 0.8))


@pytest.mark.checks("ppo", "dual clip: also 0 where A < 0 and r > c; A > 0 untouched")
def test_dual_clip() -> None:
    close(gradient_weights(-1.0, dual=3.0), RATIOS * ((RATIOS > 0.8) & (RATIOS < 3)))
    close(gradient_weights(1.0, dual=3.0), gradient_weights(1.0))
    batch = crafted([[math.log(5.0)]], [-2.0])
    close(loss_and_gradients(method("ppo", dual=3.0), batch)[0], 6.0)


@pytest.mark.checks("ppo", "the clip is one-sided: r below 1-ε with A > 0 keeps its gradient")
def test_one_sided() -> None:
    assert gradient_weights(1.0)[0] == pytest.approx(0.5)
    assert gradient_weights(-1.0)[-1] == pytest.approx(3.1)
    two_sided = RATIOS * ((RATIOS > 0.8) & (RATIOS < 1.2))  # clamping r alone, the wrong variant
    assert not torch.allclose(gradient_weights(1.0), two_sided)


@pytest.mark.checks("ppo", "r = 1: gradient -A/N and loss -mean(A)")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1)).replace(values=None)
    a = advantages(method("ppo"), batch.replace(values=batch.old_values))
    batch = batch.replace(advantages=a)
    value, grads = loss_and_gradients(method("ppo"), batch)
    close(grads["logp"], -a / batch.mask.sum())
    close(value, -a[batch.mask].mean())


@pytest.mark.checks("ppo", "γ = λ = 1, V = 0: A is the reward to go; λ = 0: A is the TD error")
def test_limits_of_gae() -> None:
    batch = make_batch(1)
    flat = batch.replace(old_values=torch.zeros_like(batch.logp))
    rho = torch.where(batch.mask, rewards_on_tokens(batch), 0.0)
    to_go = torch.where(batch.mask, rho.flip(1).cumsum(1).flip(1), 0.0)
    close(advantages(method("ppo", whitening=False), flat), to_go)
    td = advantages(method("ppo", whitening=False, lam=0.0, gamma=0.9), batch)
    for i, row in enumerate(batch.mask):
        ts = row.nonzero().squeeze(1).tolist()
        for t, following in zip(ts, [*ts[1:], None]):
            ahead = 0.0 if following is None else batch.old_values[i, following]
            close(td[i, t], rho[i, t] + 0.9 * ahead - batch.old_values[i, t])


@pytest.mark.checks("ppo", "returns minus unwhitened advantages are the rollout's values")
def test_returns() -> None:
    batch = make_batch(1)
    made = method("ppo", value_clip=None, gamma=0.9, lam=0.8)
    target = raw_gae(batch, gamma=0.9, lam=0.8) + batch.old_values
    _, grads = loss_and_gradients(made, batch)
    expected = torch.where(batch.mask, batch.values - target, 0.0) / batch.mask.sum()
    close(grads["values"], expected)


@pytest.mark.parametrize("slug", ["ppo", "reinforce-pp"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_token_rewards_do_without_a_reward_per_response(slug: str, kl_coef: float) -> None:
    batch, made = make_batch(1), method(slug, kl_coef=kl_coef)
    alone = loss_and_gradients(made, batch.replace(rewards=None))
    zero = loss_and_gradients(made, batch.replace(rewards=torch.zeros_like(batch.rewards)))
    close(alone[0], zero[0])
    close(alone[1], zero[1])
    with pytest.raises(ProxpoError, match=rf"^{slug}: .* needs the batch field 'rewards'"):
        proxpo.loss_fn(made)(batch.replace(rewards=None, token_rewards=None))


def test_value_clip_takes_the_larger_error() -> None:
    batch = make_batch(1, groups=1, size=1, tokens=1).replace(
        rewards=f64([1.0]),
        token_rewards=None,
        old_values=f64([[0.0]]),
    )
    made = method("ppo", whitening=False, value_clip=0.5)

    def critic(value: float) -> tuple[float, float]:
        at = batch.replace(values=torch.tensor([[value]]).double(), advantages=0 * batch.logp)
        loss, grads = loss_and_gradients(made, at)
        return float(loss), float(grads["values"])

    assert critic(0.4) == pytest.approx((0.18, -0.6))
    assert critic(0.9) == pytest.approx((0.125, 0.0))  # held at 0.5, where the error is larger
    assert critic(-0.9) == pytest.approx((0.5 * 1.9**2, -1.9))


def test_a_critic_learns_nothing_from_missing_rewards() -> None:
    batch = make_batch(1)
    missing = batch.replace(rewards=torch.full_like(batch.rewards, torch.nan))
    close(proxpo.prepare(method("ppo"), missing).batch.returns, batch.old_values * batch.mask)
    made = method("p3o-2019", advantage=None)
    with pytest.raises(
        proxpo.ProxpoError, match="value=value_loss needs the batch field 'rewards'"
    ):
        proxpo.loss_fn(made)(
            batch.replace(rewards=None, token_rewards=None, advantages=batch.rewards)
        )


def adapted(kl: float, controller: str, coef: float = 0.1) -> float:
    horizon = {"kl_horizon": 1000.0} if controller == "horizon" else {}
    made = method("ppo", kl_coef=coef, kl_controller=controller, kl_target=0.1, **horizon)
    batch = outcome_only(make_batch(1))
    batch = batch.replace(ref_logp=batch.old_logp - kl)
    ready = proxpo.prepare(made, batch)
    state = made.update_state(made.init_state(), batch, ready.metrics)
    return float(state["reward.kl_in_reward"]["coef"])


@pytest.mark.checks("ppo", "adaptive β: constant at the target, moves at most 0.2·n/horizon")
def test_horizon_controller() -> None:
    n = 9
    assert adapted(0.1, "horizon") == pytest.approx(0.1)
    assert adapted(0.11, "horizon") == pytest.approx(0.1 * (1 + 0.1 * n / 1000))
    assert adapted(50.0, "horizon") == pytest.approx(0.1 * (1 + 0.2 * n / 1000))
    assert adapted(0.0, "horizon") == pytest.approx(0.1 * (1 - 0.2 * n / 1000))


def test_doubling_controller() -> None:
    assert adapted(0.1, "doubling") == pytest.approx(0.1)
    assert adapted(0.14, "doubling") == pytest.approx(0.1)
    assert adapted(0.16, "doubling") == pytest.approx(0.2)
    assert adapted(0.06, "doubling") == pytest.approx(0.05)
    assert adapted(9.0, "fixed") == pytest.approx(0.1)


def test_controller_sees_the_mean_of_row_means() -> None:
    batch = outcome_only(make_batch(1))
    d = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 0.0)
    rows = d.sum(1) / batch.mask.sum(1)
    found = proxpo.prepare(method("ppo", kl_coef=0.1), batch).metrics["reward/kl"]
    close(found, rows.mean())
    assert abs(rows.mean() - d.sum() / batch.mask.sum()) > 1e-4  # the token mean is another number


def test_state_changes_the_next_loss() -> None:
    made = method("ppo", kl_coef=0.1, kl_controller="doubling")
    batch = make_batch(1)
    state = {"reward.kl_in_reward": {"coef": f64(0.4)}}
    found = proxpo.loss_fn(made)(batch, proxpo.Context(states=state)).value
    close(found, proxpo.loss_fn(method("ppo", kl_coef=0.4))(batch).value, rtol=1e-7)
