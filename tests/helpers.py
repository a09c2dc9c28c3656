"""Batches, recipes and comparisons that the tests of the core share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import proxpo
from proxpo import Batch, Context, Recipe
from proxpo.fields import find_field

VOCAB = 4
WIDTH = 3  # of hidden states, features and Gaussian actions
LEAVES = ("logp", "values", "entropy", "vocab_logp", "mean")  # what carries gradient in training


def f64(x: Any) -> Tensor:
    """Numbers in float64, whatever torch's default is."""
    return torch.as_tensor(x, dtype=torch.float64)


def make_batch(
    seed: int = 0,
    *,
    groups: int = 3,
    size: int = 3,
    tokens: int = 6,
    spread: float = 0.2,
    holes: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """A ragged batch with every field: lengths from 1, holes in the mask, stale log-probabilities.

    `spread` is the standard deviation of the log-ratios.
    """
    g = torch.Generator().manual_seed(seed)
    rows = groups * size

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=g, dtype=torch.float64)

    def near(x: Tensor) -> Tensor:
        return x + normal(*x.shape, scale=spread)

    length = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = torch.arange(tokens) < length[:, None]
    if holes:
        hole = torch.rand(rows, tokens, generator=g) < 0.15
        mask &= ~(hole & (torch.arange(tokens) > 0))
    group = torch.arange(groups).repeat_interleave(size)
    rewards = torch.randint(0, 5, (rows,), generator=g).double() / 4
    if size > 1:
        rewards[:2] = torch.tensor([1.0, 0.25])  # at least one prompt is informative
    logp = -3 * torch.rand(rows, tokens, generator=g, dtype=torch.float64) - 0.05
    old_values = normal(rows, tokens, scale=0.5)
    step_end = mask & (torch.rand(rows, tokens, generator=g) < 0.5)
    old_logp = near(logp)
    batch = Batch(
        logp=logp,
        mask=mask,
        old_logp=old_logp,
        ref_logp=near(logp),
        rollout_logp=near(old_logp),
        prox_logp=near(logp),
        entropy=2 * torch.rand(rows, tokens, generator=g, dtype=torch.float64),
        values=old_values + normal(rows, tokens, scale=0.3),
        old_values=old_values,
        token_rewards=torch.where(step_end, normal(rows, tokens, scale=0.3), 0.0),
        step_end=step_end,
        lag=torch.randint(0, 5, (rows, tokens), generator=g),
        vocab_logp=normal(rows, tokens, VOCAB).log_softmax(-1),
        old_vocab_logp=normal(rows, tokens, VOCAB).log_softmax(-1),
        tokens=torch.randint(0, VOCAB, (rows, tokens), generator=g),
        rewards=rewards,
        group=group,
        greedy_rewards=torch.rand(groups, generator=g, dtype=torch.float64)[group],
        correct=rewards > 0.6,
        truncated=torch.rand(rows, generator=g) < 0.2,
    )
    return cast(batch.replace(**_further_fields(mask, group, g)), dtype)


def _further_fields(mask: Tensor, group: Tensor, g: torch.Generator) -> dict[str, Tensor]:
    """What turns, environments, hidden states and Gaussian policies bring; drawn last."""
    rows, tokens = mask.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    old_mean = uniform(rows, tokens, WIDTH)
    return {
        "turn": (torch.rand(rows, tokens, generator=g) < 0.4).cumsum(1),
        "prompt_id": 5 * group + 2,
        "old_mean": old_mean,
        "mean": old_mean + 0.2 * uniform(rows, tokens, WIDTH) - 0.1,
        "ref_mean": old_mean + 0.2 * uniform(rows, tokens, WIDTH) - 0.1,
        "noise": 0.2 + uniform(rows, tokens),
        "step_size": 0.05 + 0.1 * uniform(rows, tokens),
        "time": 0.1 + 0.8 * uniform(rows, tokens),
        "hidden": uniform(rows, tokens, WIDTH) - 0.5,
        "features": uniform(rows, WIDTH) - 0.5,
        "span_rewards": torch.randint(-1, 2, (rows, tokens), generator=g).double(),
        "duration": 1 + 3 * uniform(rows),
        "void": torch.rand(rows, generator=g) < 0.3,
        "prev_logp": -3 * uniform(rows, tokens) - 0.05,
        "ref_kl": uniform(rows, tokens),
        **_turns_of_episodes(mask, group, uniform),
        "predicted_noise": uniform(rows, tokens, WIDTH),
        "ref_predicted_noise": uniform(rows, tokens, WIDTH),
        "latent": torch.rand(rows, tokens, generator=g) < 0.4,
        "thought": old_mean + 0.6 * uniform(rows, tokens, WIDTH) - 0.3,
    }


def _turns_of_episodes(mask: Tensor, group: Tensor, uniform: Any) -> dict[str, Tensor]:
    """Rows as turns: of one episode in even groups, of several in odd ones."""
    rows, tokens = mask.shape
    place = torch.arange(rows) - torch.searchsorted(group, group)
    known = uniform(rows, tokens) > 0.15
    return {
        "episode": torch.where(group % 2 == 1, place // 2, 0),
        "step": place,
        "attempt": (place + 1) // 2,
        "reflect": uniform(rows) < 0.3,
        "step_rewards": uniform(rows) - 0.3,
        "state": (2 * uniform(rows)).long(),
        "summary": uniform(rows, tokens) < 0.4,
        "full_logp": torch.where(known, -3 * uniform(rows, tokens) - 0.05, 0.0),
        "segment_draw": uniform(rows),
    }


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The same batch with all floating fields in `dtype`."""
    changed = {k: v.to(dtype) for k, v in batch.items() if v.is_floating_point()}
    return batch.replace(**changed)


def with_leaves(batch: Batch) -> Batch:
    """The batch with fresh leaves of autograd where a model would stand."""
    fresh = {k: v.detach().clone().requires_grad_() for k, v in batch.items() if k in LEAVES}
    return batch.replace(**fresh)


def gradients(value: Tensor, batch: Batch) -> dict[str, Tensor]:
    """dvalue/dfield for every leaf; 0 where the value does not depend on it."""
    leaves = {k: v for k, v in batch.items() if v.requires_grad}
    if not value.requires_grad:
        return {k: torch.zeros_like(v) for k, v in leaves.items()}
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        k: torch.zeros_like(leaf) if grad is None else grad
        for (k, leaf), grad in zip(leaves.items(), found)
    }


def loss_and_gradients(
    made: Recipe, batch: Batch, ctx: Context = Context()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a whole batch and its gradients with respect to what a model gives."""
    batch = with_leaves(batch)
    value = proxpo.loss_fn(made)(batch, ctx).value
    return value.detach(), gradients(value, batch)


def policy_gradient(made: Recipe, batch: Batch, ctx: Context = Context()) -> Tensor:
    """dloss/dlogp."""
    return loss_and_gradients(made, batch, ctx)[1]["logp"]


def method(slug: str, **settings: Any) -> Recipe:
    return proxpo.make_recipe(slug, settings)


def close(found: Any, expected: Any, *, rtol: float = 1e-11, atol: float = 1e-12) -> None:
    """Equal numbers, tensors or tables of tensors; float64 unless told otherwise."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value, rtol=rtol, atol=atol)
        return
    a, b = f64(found), f64(expected)
    torch.testing.assert_close(a, b.expand_as(a) if b.dim() == 0 else b, rtol=rtol, atol=atol)


def pad_columns(batch: Batch, columns: int, garbage: float = 0.0) -> Batch:
    """Masked columns on the right."""

    def padded(name: str, x: Tensor) -> Tensor:
        if x.shape[:2] != batch.mask.shape or not find_field(name).per_token:
            return x
        fill = garbage if x.is_floating_point() else 0
        shape = (x.shape[0], columns, *x.shape[2:])
        return torch.cat([x, torch.full(shape, fill, dtype=x.dtype)], dim=1)

    return Batch(**{k: padded(k, v) for k, v in batch.items()})


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Responses without tokens and without a reward, to a prompt of their own."""

    def padded(name: str, x: Tensor) -> Tensor:
        fill = float("nan") if name == "rewards" else -1 if name == "group" else 0
        return torch.cat([x, torch.full((rows, *x.shape[1:]), fill, dtype=x.dtype)])

    return Batch(**{k: padded(k, v) for k, v in batch.items()})


def with_garbage(batch: Batch, garbage: float) -> Batch:
    """`garbage` at every masked position of every floating field."""

    def spoilt(name: str, x: Tensor) -> Tensor:
        if (
            x.shape[:2] != batch.mask.shape
            or not find_field(name).per_token
            or not x.is_floating_point()
        ):
            return x
        mask = batch.mask.reshape(batch.mask.shape + (1,) * (x.dim() - 2))
        return torch.where(mask, x, garbage)

    return Batch(**{k: spoilt(k, v) for k, v in batch.items()})


def crafted(log_ratio: Any, advantages: Any, *, mask: Any = None, **fields: Any) -> Batch:
    """A batch from its log-ratios to the old policy and its advantages (per row or per token)."""
    z = torch.as_tensor(log_ratio, dtype=torch.float64)
    logp = -1.0 - 0.1 * torch.arange(z.numel(), dtype=torch.float64).reshape(z.shape)
    return Batch(
        logp=logp,
        old_logp=logp - z,
        mask=torch.ones_like(z, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool(),
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        **fields,
    )


def mismatch(q: list[list[float]], **fields: Any) -> Batch:
    """A batch with log π_old - log π_roll = q."""
    batch = crafted(torch.zeros_like(f64(q)), [1.0] * len(q), **fields)
    return batch.replace(rollout_logp=batch.old_logp - f64(q))


def on_policy(batch: Batch) -> Batch:
    """The batch as if drawn from the current policy: every other log-probability equals logp."""
    names = ("old_logp", "rollout_logp", "prox_logp")
    return batch.replace(**dict.fromkeys(names, batch.logp.clone()))


def advantages(made: Recipe, batch: Batch) -> Tensor:
    """Per-token advantages the recipe computes; 0 where masked."""
    return proxpo.prepare(made, batch).batch.advantages


def per_row(x: Tensor, batch: Batch) -> Tensor:
    """The value all valid tokens of a row share; fails if they differ."""
    first = torch.stack([row[m][0] for row, m in zip(x, batch.mask)])
    close(x, torch.where(batch.mask, first[:, None], 0.0))
    return first


def outcome_only(batch: Batch) -> Batch:
    """The batch without rewards on single tokens."""
    return batch.replace(token_rewards=None, step_end=None)
