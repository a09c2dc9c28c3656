"""Degenerate batches: nothing valid, nothing to learn, far off policy, low precision."""

import math

import pytest
import torch
from helpers import advantages, cast, close, gradients, loss_and_gradients, make_batch, with_leaves
from methods.cases import CASES, recipe
from torch import Tensor

import proxpo
from proxpo import Batch
from proxpo.fields import find_field

OTHER_REWARDS = ("attempts", "episode_gae", "group_process")  # those of turns and of steps
every_case = pytest.mark.parametrize("case", CASES)


def assert_finite(case: str, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = with_leaves(batch)
    value, metrics = proxpo.loss_fn(recipe(case))(leaves)
    grads = gradients(value, leaves)
    for name, seen in {"loss": value, **metrics, **grads}.items():
        assert seen.isfinite().all(), name
    return value.detach(), grads


@every_case
def test_empty_mask(case: str) -> None:
    batch = make_batch(1)
    value, grads = assert_finite(case, batch.replace(mask=torch.zeros_like(batch.mask)))
    assert value == 0
    assert all(grad.eq(0).all() for grad in grads.values())


@every_case
@pytest.mark.parametrize("without", ["rows", "tokens"])
def test_a_batch_without(case: str, without: str) -> None:
    batch = make_batch(1)
    tokens = batch.mask.shape[1]
    fields = {
        name: x[:, : x.shape[1] - tokens] if find_field(name).per_token and x.dim() > 1 else x
        for name, x in batch.items()
    }
    leaves = with_leaves(batch.rows(slice(0, 0)) if without == "rows" else Batch(**fields))
    value = proxpo.loss_fn(recipe(case))(leaves).value
    assert value == 0
    assert all(grad.isfinite().all() for grad in gradients(value, leaves).values())


@every_case
def test_groups_of_one_and_single_tokens(case: str) -> None:
    batch = make_batch(1, groups=4, size=1, tokens=3)
    assert batch.mask.sum(1).min() == 1
    assert_finite(case, batch)


@every_case
def test_zero_variance_groups(case: str) -> None:
    batch = make_batch(1)
    batch = batch.replace(rewards=torch.full_like(batch.rewards, 0.1))
    assert_finite(case, batch)
    stage = recipe(case).advantage
    centred = stage is not None and stage.name in ("group_relative", "length_weighted_baseline")
    if centred and not recipe(case).reward:
        close(advantages(recipe(case), batch), 0.0 * batch.logp, atol=0.0)


@every_case
def test_missing_rewards(case: str) -> None:
    batch = make_batch(1)
    rewards = batch.rewards.clone()
    rewards[[1, 4]] = math.nan
    assert_finite(case, batch.replace(rewards=rewards))
    made = recipe(case)
    replaced = any(stage.name == "span_reward" for stage in made.reward)
    if made.advantage is not None and made.advantage.name not in OTHER_REWARDS and not replaced:
        found = advantages(made, batch.replace(rewards=rewards))
        close(found[[1, 4]], 0.0 * batch.logp[[1, 4]], atol=0.0)
        others = torch.tensor([0, 2, 3, 5, 6, 7, 8])
        if made.advantage.name in ("discounted_return", "gae"):
            close(found[others], advantages(made, batch.rows(others)))


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].slug != "dpo"])
def test_zero_advantages_leave_only_the_regularisers(case: str) -> None:
    batch = make_batch(1)
    batch = batch.replace(advantages=torch.zeros(len(batch.mask), dtype=torch.float64))
    bare = recipe(case).replace(regularisers=(), value=None)
    value, grads = loss_and_gradients(bare, batch)
    assert value == 0
    assert all(grad.eq(0).all() for grad in grads.values())


def far_off_policy() -> Batch:
    """Log-ratios of up to 50 between any two policies, of both signs, no probability above 1."""
    batch = make_batch(1, groups=4, size=4, tokens=9)
    steps = torch.tensor([0.0, 0.1, 10.0, 20.5, 50.0]).double()
    sign = 1 - 2 * (torch.arange(16) % 2).double()[:, None]
    g = torch.Generator().manual_seed(5)

    def drawn() -> Tensor:
        return sign * steps[torch.randint(0, len(steps), batch.mask.shape, generator=g)]

    base = -0.5 - torch.full(batch.mask.shape, 50.0).double()
    others = ("old_logp", "ref_logp", "rollout_logp", "prox_logp")
    return cast(
        batch.replace(logp=base, **{name: base - drawn() for name in others}), torch.float32
    )


@every_case
def test_far_off_policy(case: str) -> None:
    """In float32, which overflows first."""
    assert_finite(case, far_off_policy())


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_low_precision_is_close(case: str, dtype: torch.dtype) -> None:
    """Against float64 on the same, rounded numbers; half precision is raised to float32 inside."""
    low = cast(make_batch(4, tokens=5), dtype)
    value, grads = loss_and_gradients(recipe(case), low)
    exact, exact_grads = loss_and_gradients(recipe(case), cast(low, torch.float64))
    close(value, exact, rtol=1e-4, atol=1e-5)
    rounding = 2e-5 if dtype == torch.float32 else 8e-3  # of the gradient's own dtype
    for name, grad in exact_grads.items():
        scale = float(grad.abs().max())
        close(grads[name], grad, rtol=rounding, atol=rounding * scale)
        assert grads[name].dtype == dtype
