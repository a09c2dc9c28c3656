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
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import (
    clipped,
    informative,
    kept,
    number,
    prompt_mean,
    ratio,
    row,
    token_mean,
    z_scores,
)
from proxpo import Batch
from proxpo.settings import at_length
from proxpo.stages.reward import overlong_penalty
from proxpo.types import Context


def overlong(b: Batch, *, most: float, cache: float, floor: bool) -> Batch:
    shaped = []
    for i in range(len(b.mask)):
        n = len(row(b, i))
        penalty = 0.0 if n <= most - cache else ((most - cache) - n) / cache
        shaped.append(number(b.rewards[i]) + (max(penalty, -1.0) if floor else penalty))
    return b.replace(rewards=torch.tensor(shaped, dtype=torch.float64))


def dapo(b: Batch) -> torch.Tensor:
    a = z_scores(overlong(b, most=5, cache=4, floor=True))
    return token_mean(clipped(ratio(b), a, 0.2, 0.28), b)


def dapo_prompt(b: Batch) -> torch.Tensor:
    a = z_scores(overlong(b, most=5, cache=4, floor=False))
    rows = informative(b)
    b = kept(b, lambda i, t: i in rows and not b.truncated[i])
    return prompt_mean(clipped(ratio(b), a, 0.2, 0.28, dual=1.4), b)


CASES = {
    "dapo": Case("dapo", {"max_tokens": 5, "cache": 4}, dapo),
    "dapo-prompt": Case(
        "dapo",
        {
            "average": "prompt",
            "group_filter": "mask",
            "overlong": "both",
            "max_tokens": 5,
            "cache": 4,
            "penalty_floor": False,
            "dual": 1.4,
        },
        dapo_prompt,
    ),
}


@pytest.mark.checks("dapo", "equal bounds, mean of response means, no penalty: GRPO")
def test_reduces_to_grpo() -> None:
    batch = make_batch(1)
    made = method("dapo", clip_high=0.2, overlong="off", aggregate="seq_mean_token_mean")
    close(loss_and_gradients(made, batch)[1], loss_and_gradients(method("grpo"), batch)[1])


@pytest.mark.checks("dapo", "silent only for A > 0, r > 1.28 or A < 0, r < 0.8")
def test_clip_higher() -> None:
    ratios = f64([0.5, 0.79, 0.81, 1.0, 1.25, 1.29])
    logs = ratios.log().tolist()
    batch = crafted([logs, logs], [1.0, -1.0])
    live = torch.stack([ratios < 1.28, ratios > 0.8])
    sign = f64([[1.0], [-1.0]])
    close(policy_gradient(method("dapo"), batch), -sign * ratios * live / 12)
    assert policy_gradient(method("grpo"), batch)[0, 4] == 0


def penalties(lengths: list[int], **options: object) -> torch.Tensor:
    batch = make_batch(1, groups=1, size=len(lengths), tokens=40, holes=False)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    batch = batch.replace(mask=mask, rewards=torch.zeros(len(lengths)).double())
    return overlong_penalty(**options).apply(batch, Context())[0].rewards


@pytest.mark.checks("dapo", "penalty: 0 at L_max-L_c, -1/2 half way, -1 at L_max, never rising")
def test_soft_overlong_punishment() -> None:
    edges = penalties([12, 16, 20, 24, 30], max_tokens=20, cache=8)
    close(edges, f64([0.0, -0.5, -1.0, -1.0, -1.0]))
    every = penalties(list(range(1, 40)), max_tokens=20, cache=8)
    assert (every.diff() <= 0).all()
    linear = penalties([12, 20, 24], max_tokens=20, cache=8, floor=False)
    close(linear, f64([0.0, -1.0, -1.5]))


@pytest.mark.checks("dapo", "token mean: every token weighs 1/N whatever its response's length")
def test_token_mean() -> None:
    batch = on_policy(make_batch(1))
    batch = batch.replace(advantages=torch.ones(9).double())
    close(policy_gradient(method("dapo"), batch), -batch.mask.double() / batch.mask.sum())


def test_prompt_mean_weighs_prompts_alike() -> None:
    batch = on_policy(make_batch(1))
    batch = batch.replace(advantages=torch.ones(9).double())
    found = policy_gradient(method("dapo", average="prompt"), batch)
    close(found.view(3, -1).sum(1), -torch.ones(3).double() / 3)
    tokens = batch.mask.double().view(3, -1).sum(1)
    assert tokens.unique().numel() > 1
    close(found[:, 0].view(3, 3), (-1 / (3 * tokens))[:, None].expand(3, 3))


@pytest.mark.checks("dapo", "the filter keeps prompts with 1..G-1 right answers, none of std 0")
def test_group_filter() -> None:
    right = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]]).bool().flatten()
    batch = make_batch(1, groups=4).replace(correct=right, rewards=right.double())
    made = method("dapo", group_filter="mask", overlong="off")
    ready = proxpo.prepare(made, batch)
    kept = ready.batch.mask.any(1)
    assert kept.tolist() == [False] * 6 + [True] * 6
    assert (ready.batch.advantages[kept].abs().amax(1) > 0).all()
    assert ready.ctx.counts.tokens == batch.mask[6:].sum()
    keep, _ = method("dapo").prompts[0].apply(batch, Context())
    assert keep.tolist() == kept.tolist()


def test_length_penalty_makes_no_group_informative() -> None:
    """All answers right, one of them too long: the shaped rewards differ, the accuracy does not."""
    batch = make_batch(1, groups=2, holes=False)
    right = torch.tensor([True, True, True, True, False, True])
    mask = torch.arange(6) < torch.tensor([6, 1, 1, 2, 2, 2])[:, None]
    options = {"group_filter": "mask", "max_tokens": 6, "cache": 4}
    for known in (right, None):
        plain = batch.replace(mask=mask, rewards=right.double(), correct=known)
        kept = proxpo.prepare(method("dapo", **options), plain).batch.mask.any(1)
        assert kept.tolist() == [False] * 3 + [True] * 3


def test_advantages_come_from_the_shaped_reward() -> None:
    batch = make_batch(1, holes=False)
    batch = batch.replace(rewards=torch.ones_like(batch.rewards))
    close(advantages(method("dapo", overlong="off"), batch), 0 * batch.logp)
    assert advantages(method("dapo", max_tokens=5, cache=4), batch).abs().max() > 0.1


def test_everything_filtered_is_no_update() -> None:
    batch = make_batch(1).replace(correct=torch.ones(9, dtype=torch.bool))
    value, grads = loss_and_gradients(method("dapo", group_filter="mask"), batch)
    assert value == 0
    assert grads["logp"].eq(0).all()


def test_overlong_filter_masks_truncated_rows() -> None:
    batch = make_batch(1).replace(truncated=torch.arange(9) == 4)
    ready = proxpo.prepare(method("dapo", overlong="filter"), batch)
    assert not ready.batch.mask[4].any()
    assert ready.ctx.counts.tokens == batch.mask.sum() - batch.mask[4].sum()


def test_the_penalty_follows_the_hosts_length() -> None:
    """L_max is the host's limit and L_c a fifth of it, as 4096 is of 20480, unless they are set."""
    batch = make_batch(1, tokens=6, holes=False)

    def rewards(length: int | None, **options: object) -> torch.Tensor:
        made = at_length(method("dapo", **options), length)
        return proxpo.prepare(made, batch).batch.rewards

    lengths = batch.mask.sum(1).double()
    close(rewards(6), batch.rewards + ((6 - 1.2 - lengths) / 1.2).clamp(-1, 0))
    assert rewards(6).ne(batch.rewards).any()
    close(rewards(None), batch.rewards)
    close(rewards(6, max_tokens=20480.0), batch.rewards)
    close(rewards(6, cache=2), batch.rewards + ((4 - lengths) / 2).clamp(-1, 0))
    close(rewards(40, max_tokens=5, cache=4), rewards(None, max_tokens=5, cache=4))
    with pytest.raises(proxpo.ProxpoError, match="need 0 ≤ cache ≤ max_tokens, got 4096, 6"):
        rewards(6, cache=4096)


def test_the_official_length_stands_without_a_host() -> None:
    batch = make_batch(1, tokens=6).replace(rewards=torch.zeros(9).double())
    longest = overlong_penalty(max_tokens=20480, cache=4096).apply
    wide = torch.ones(9, 20479, dtype=torch.bool)
    long = Batch(logp=torch.zeros(9, 20479), mask=wide, rewards=batch.rewards, group=batch.group)
    assert longest(long, Context())[0].rewards.lt(0).all()
    close(overlong_penalty().apply(long, Context())[0].rewards, longest(long, Context())[0].rewards)
    assert math.isclose(method("dapo").trust.options["clip_high"], 0.28)


def test_no_soft_zone() -> None:
    close(penalties([19, 20, 21], max_tokens=20, cache=0), f64([0.0, 0.0, -1.0]))
