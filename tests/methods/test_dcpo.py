import math
from typing import Any

import pytest
import torch
from helpers import advantages, close, crafted, f64, loss_and_gradients, make_batch, method
from helpers import policy_gradient as gradient_of

import proxpo
from methods._case import Case
from methods.loops import (
    Bounds,
    Numbers,
    Terms,
    clipped_between,
    everywhere,
    groups,
    mean,
    number,
    ratio,
    row,
    std,
    token_mean,
)
from proxpo import Batch
from proxpo.stages.trust.dynamic import dynamic_bounds


def first_visit(b: Batch) -> Numbers:
    r, out = b.rewards.tolist(), {}
    for members in groups(b).values():
        inside = [r[i] for i in members]
        spread = std(inside) if len(inside) > 1 else 0.0
        for i in members:
            out[i] = (r[i] - mean(inside)) / spread if max(inside) > min(inside) else 0.0
    return everywhere(out, b)


def dcpo_terms(b: Batch, low: float, high: float, *, dual: float) -> Terms:
    def bounds(k: Any) -> Bounds:
        q = math.exp(number(b.old_logp[k]))
        lo = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / q, 0.0))
        return lo, min(0.5 + 0.5 * math.sqrt(1 + 4 * high / q), 10.0)

    return clipped_between(ratio(b), first_visit(b), bounds, dual=dual)


def dcpo(b: Batch) -> torch.Tensor:
    x = dcpo_terms(b, 0.16, 0.2, dual=10.0)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    return sum(mean([x[i, t] for t in row(b, i)]) for i in rows)


CASES = {
    "dcpo": Case("dcpo", {}, dcpo),
    "dcpo-code": Case(
        "dcpo",
        {"history": False, "average": "token", "clip_low": 0.02, "clip_high": 0.03, "dual": 1.2},
        lambda b: token_mean(dcpo_terms(b, 0.02, 0.03, dual=1.2), b),
    ),
}


SLUG = "dcpo"


def prompt(rewards: list[float], prompt_id: int = 7) -> Batch:
    """Responses of one token to one prompt."""
    n = len(rewards)
    logp = torch.full((n, 1), -1.0, dtype=torch.float64)
    return Batch(
        logp=logp,
        old_logp=logp.clone(),
        mask=torch.ones(n, 1, dtype=torch.bool),
        rewards=f64(rewards),
        group=torch.zeros(n, dtype=torch.int64),
        prompt_id=torch.full((n,), prompt_id),
    )


def visited(*visits: list[float], prompt_id: int = 7) -> dict:
    """The state after these visits of the prompt."""
    made = method(SLUG)
    state = made.init_state()
    for rewards in visits:
        state = made.update_state(state, prompt(rewards, prompt_id), {})
    return state


def at(state: dict, rewards: list[float], prompt_id: int = 7) -> torch.Tensor:
    batch = prompt(rewards, prompt_id)
    return proxpo.prepare(method(SLUG), batch, proxpo.Context(states=state)).batch.advantages[:, 0]


def remembered(*visits: list[float]) -> tuple[int, float, float]:
    """Visits, mean and std by plain recursion."""
    k, mean, std = 0, 0.0, 0.0
    for rewards in visits:
        mu = sum(rewards) / len(rewards)
        var = sum((r - mu) ** 2 for r in rewards) / (len(rewards) - 1)
        i = k + 1
        var = (k * std**2 + var + k / i * (mu - mean) ** 2) / i
        mean, std, k = (k * mean + mu) / i, math.sqrt(var), i
    return k, mean, std


def expected(history: list[list[float]], rewards: list[float]) -> list[float]:
    i, mean, std = remembered(*history, rewards)
    mu = sum(rewards) / len(rewards)
    sigma = math.sqrt(sum((r - mu) ** 2 for r in rewards) / (len(rewards) - 1))
    out = []
    for r in rewards:
        new = (r - mu) / sigma if sigma else 0.0
        total = (r - mean) / std if std else 0.0
        s_new = (i - 1) / i * new + total / i
        s_total = new / i + (i - 1) / i * total
        out.append(s_new if abs(s_new) < abs(s_total) else s_total)
    return out


@pytest.mark.checks(SLUG, "first visit: the z-score with sample std and no ε")
def test_first_visit() -> None:
    batch = make_batch(1)
    plain = advantages(method("grpo", eps=0.0), batch)
    close(advantages(method(SLUG), batch), plain)
    close(advantages(method(SLUG, history=False), batch), plain)


@pytest.mark.checks(SLUG, "later visits: statistics of all of them, the present one included")
@pytest.mark.parametrize("visits", [1, 2, 5])
def test_against_plain_recursion(visits: int) -> None:
    g = torch.Generator().manual_seed(visits)
    history = [torch.rand(4, generator=g, dtype=torch.float64).tolist() for _ in range(visits)]
    state, now = visited(*history), [0.0, 1.0, 0.25, 0.5, 0.5]
    k, mean, std = remembered(*history)
    close([float(state["advantage"][name]) for name in ("visits", "mean", "std")], [k, mean, std])
    close(at(state, now), expected(history, now))


@pytest.mark.checks(SLUG, "equal rewards now, varied history: A = A_tot/i; equal always: A = 0")
def test_equal_rewards_can_still_teach() -> None:
    history = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    i, mean, std = remembered(*history, [1.0, 1.0])
    assert i == 4
    close(at(visited(*history), [1.0, 1.0]), [(1.0 - mean) / std / 4] * 2)
    state = visited(*[[0.1, 0.1]] * 6)
    assert at(state, [0.1, 0.1]).eq(0).all()
    assert state["advantage"]["std"].eq(0).all()


@pytest.mark.checks(SLUG, "many visits: the smaller in magnitude of A_new and A_tot")
def test_many_visits() -> None:
    state = visited([0.0, 1.0, 1.0])
    state["advantage"]["visits"] = f64([1e9])
    now = [0.0, 0.2, 1.0]
    z = (f64(now) - f64(now).mean()) / f64(now).std()
    total = (f64(now) - state["advantage"]["mean"]) / state["advantage"]["std"]
    close(at(state, now), torch.where(z.abs() < total.abs(), z, total), rtol=1e-6)


def test_prompts_are_remembered_apart() -> None:
    state = visited([0.0, 1.0, 1.0])
    close(at(state, [0.0, 1.0], prompt_id=3), at(method(SLUG).init_state(), [0.0, 1.0]))
    made = method(SLUG)
    both = made.update_state(state, prompt([0.5, 0.0], 3), {})["advantage"]
    assert both["prompt_id"].tolist() == [3, 7]
    close(both["mean"], [0.25, 2 / 3])


def test_a_group_without_two_rewards_is_no_visit() -> None:
    state = visited([0.0, 1.0])
    assert at(state, [1.0]).eq(0).all()
    after = method(SLUG).update_state(state, prompt([1.0, math.nan]), {})
    assert after["advantage"]["visits"].tolist() == [1.0]


@pytest.mark.checks(
    SLUG, "bounds: (hi-1)·hi·q = ε_hi and, where the root is real, (1-lo)·lo·q = ε_lo"
)
def test_bounds_solve_their_equation() -> None:
    q = f64([[0.9, 0.7, 0.65, 0.3, 0.05]])
    low, high = dynamic_bounds(q.log(), low=0.16, high=0.2, most=10.0)
    close((high - 1) * high * q, 0.2)
    real = q >= 4 * 0.16
    close(((1 - low) * low * q)[real], 0.16)
    close(low[~real], 0.5)
    assert real.sum() == 3


@pytest.mark.checks(SLUG, "hi falls and lo rises with q; q = 1: 0.8 and 1.1708; q = 0: 0.5 and 10")
def test_bounds_by_probability() -> None:
    logp = f64([[-math.inf, -700.0, -5.0, -2.0, -0.4, -0.1, 0.0]])
    low, high = dynamic_bounds(logp, low=0.16, high=0.2, most=10.0)
    assert (low.diff() >= 0).all()
    assert (high.diff() <= 0).all()
    close(low[0, [0, -1]], [0.5, 0.8])
    close(high[0, [0, -1]], [10.0, 0.5 + 0.5 * math.sqrt(1.8)])
    close(high[0, -1], 1.1708, atol=1e-4)
    example = dynamic_bounds(f64([[0.9, 0.01]]).log(), low=0.16, high=0.2, most=10.0)
    close(torch.stack(example), [[[0.769, 0.5]], [[1.187, 5.0]]], atol=1e-3)


def test_two_groups_of_a_prompt_in_one_batch_are_two_visits() -> None:
    """As where an epoch ends within a rollout: both are counted, one after the other."""
    first, second = prompt([0.0, 1.0]), prompt([1.0, 1.0])
    second = second.replace(group=second.group + 1)
    joined = Batch(
        **{name: torch.cat([value, getattr(second, name)]) for name, value in first.items()}
    )
    recipe = method(SLUG)
    together = recipe.update_state(recipe.init_state(), joined, {})["advantage"]
    apart = visited([0.0, 1.0], [1.0, 1.0])["advantage"]
    for name in ("visits", "mean", "std"):
        close(together[name], apart[name])


@pytest.mark.checks(SLUG, "the bounds depend on the old policy alone")
def test_bounds_do_not_look_at_the_current_policy() -> None:
    batch = crafted([[0.3, 2.0, -1.0]], [1.0])
    moved = batch.replace(logp=batch.logp + 1)
    both = [proxpo.loss_fn(method(SLUG))(b).metrics for b in (batch, moved)]
    close(both[0]["trust/high"], both[1]["trust/high"])


def test_improbable_tokens_may_move_further() -> None:
    """Ratio 2 is inside for q = 0.05 and outside for q = 0.5."""
    batch = crafted([[math.log(2.0)] * 2], [1.0])
    old = f64([[0.05, 0.5]]).log()
    batch = batch.replace(old_logp=old, logp=old + math.log(2.0))
    close(gradient_of(method(SLUG), batch), [[-1.0, 0.0]])


def test_dual_clip_silences_large_ratios_of_negative_tokens() -> None:
    batch = crafted([[math.log(9.0), math.log(11.0)]], [-1.0])
    close(gradient_of(method(SLUG), batch), [[4.5, 0.0]])
    close(gradient_of(method(SLUG, dual=None), batch), [[4.5, 5.5]])


@pytest.mark.checks(SLUG, "only-token-mean: response means are added, not averaged")
def test_averages() -> None:
    batch = make_batch(1)
    grpo_like = method(SLUG, aggregate="seq_mean_token_mean")
    close(gradient_of(method(SLUG), batch), 9 * gradient_of(grpo_like, batch))
    value, _ = loss_and_gradients(method(SLUG, average="token"), batch)
    tokens, _ = loss_and_gradients(method(SLUG, aggregate="token_mean"), batch)
    close(value, tokens)


def test_history_needs_the_number_of_the_prompt() -> None:
    batch = make_batch(1).replace(prompt_id=None)
    with pytest.raises(ValueError, match=r"'prompt_id' .*same at every visit, from the sampler"):
        proxpo.loss_fn(method(SLUG))(batch)
    assert proxpo.loss_fn(method(SLUG, history=False))(batch).value.isfinite()


def test_defaults_are_the_papers() -> None:
    options = method(SLUG).trust.options
    assert options == {"clip_low": 0.16, "clip_high": 0.2, "most": 10.0, "dual": 10.0}


@pytest.mark.parametrize("option", [{"clip_low": -0.1}, {"ratio_max": 0.5}, {"dual": 1.0}])
def test_refused(option: dict) -> None:
    with pytest.raises(ValueError, match="dynamic_clip"):
        method(SLUG, **option)
