"""How token losses become one scalar."""

import pytest
import torch
from helpers import close, f64, make_batch, pad_columns, pad_rows
from torch import Tensor

import proxpo
from proxpo import Batch
from proxpo.compose import count, tokens_of_group
from proxpo.stages import aggregate

K = 7.0
MODES = {
    "token_mean": aggregate.token_mean(),
    "token_sum": aggregate.token_sum(),
    "seq_mean_token_sum": aggregate.seq_mean_token_sum(),
    "seq_mean_token_mean": aggregate.seq_mean_token_mean(),
    "constant_length": aggregate.constant_length(max_tokens=K),
    "prompt_mean": aggregate.prompt_mean(),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def batch_of(seed: int = 1) -> Batch:
    """Ragged, unequal groups, one row without any token."""
    batch = make_batch(seed, groups=1, size=7)
    mask = batch.mask.clone()
    mask[4] = False
    group = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    return with_counts(batch.replace(mask=mask, group=group))


def with_counts(batch: Batch) -> Batch:
    return batch.replace(group_tokens=tokens_of_group(batch))


def reduce(mode: str, x: Tensor, batch: Batch, counts: object = None) -> Tensor:
    ctx = proxpo.Context(denominators=count(batch) if counts is None else counts)
    return MODES[mode].apply(x, batch, ctx)[0]


def weights(mode: str, batch: Batch) -> Tensor:
    """What the definitions give each valid token."""
    mask = batch.mask.double()
    length = mask.sum(1, keepdim=True).clamp(min=1)
    n, rows = mask.sum(), batch.mask.any(1).double().sum()
    prompts = batch.group[batch.mask.any(1)].unique().numel()
    per_prompt = f64([float(mask[batch.group == g].sum()) for g in batch.group])[:, None]
    return (
        mask
        * {
            "token_mean": 1 / n,
            "token_sum": 1.0,
            "seq_mean_token_sum": 1 / rows,
            "seq_mean_token_mean": 1 / (rows * length),
            "constant_length": 1 / (rows * K),
            "prompt_mean": 1 / (prompts * per_prompt),
        }[mode]
    )


@every_mode
@pytest.mark.checks("aggregation", "the gradient of a token loss is the weight its mode defines")
def test_gradient_is_the_weight(mode: str) -> None:
    batch = batch_of()
    x = batch.logp.clone().requires_grad_()
    value = reduce(mode, x, batch)
    expected = weights(mode, batch)
    close(torch.autograd.grad(value, x)[0], expected)
    close(value.detach(), (expected * batch.logp).sum())


@pytest.mark.checks("aggregation", "equal lengths: the three means agree; the sum is L times them")
def test_equal_lengths() -> None:
    batch = make_batch(1)
    batch = with_counts(batch.replace(mask=torch.ones_like(batch.mask)))
    means = ["token_mean", "seq_mean_token_mean", "prompt_mean"]
    first, second, third = (reduce(mode, batch.logp, batch) for mode in means)
    close(first, second)
    close(first, third)
    close(reduce("seq_mean_token_sum", batch.logp, batch), 6 * first)


@pytest.mark.checks("aggregation", "the weights sum to 1, or to the mean length for sums over rows")
def test_sum_of_the_weights() -> None:
    batch = batch_of()
    ones = torch.ones_like(batch.logp)
    for mode in ("token_mean", "seq_mean_token_mean", "prompt_mean"):
        close(reduce(mode, ones, batch), 1.0)
    lengths = batch.mask.sum(1)[batch.mask.any(1)].double()
    close(reduce("seq_mean_token_sum", ones, batch), lengths.mean())


@every_mode
@pytest.mark.checks("aggregation", "micro-batches with global divisors add up to the whole")
def test_microbatches(mode: str) -> None:
    batch = batch_of()
    counts = count(batch)
    parts = [batch.rows(slice(0, 2)), batch.rows(slice(2, 3)), batch.rows(slice(3, 7))]
    total = sum(reduce(mode, part.logp, part, counts) for part in parts)
    close(total, reduce(mode, batch.logp, batch))
    if mode != "token_sum":
        own = [reduce(mode, part.logp, part, count(part)) for part in parts]
        assert abs(sum(own) / 3 - total) > 1e-3  # averaging the parts' own averages is wrong


@every_mode
@pytest.mark.checks("aggregation", "masked columns and empty rows change nothing")
def test_padding(mode: str) -> None:
    batch = batch_of()
    expected = reduce(mode, batch.logp, batch)
    for padded in (pad_columns(batch, 3, garbage=9.0), pad_rows(batch, 2)):
        padded = with_counts(padded)
        close(reduce(mode, padded.logp, padded), expected)


@every_mode
def test_nothing_valid_is_zero(mode: str) -> None:
    batch = batch_of()
    batch = with_counts(batch.replace(mask=torch.zeros_like(batch.mask)))
    x = torch.full_like(batch.logp, torch.nan).requires_grad_()
    value = reduce(mode, x, batch)
    assert value == 0
    assert torch.autograd.grad(value, x)[0].eq(0).all()


@pytest.mark.parametrize("mode", ["seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
def test_empty_rows_count_when_asked(mode: str) -> None:
    batch = batch_of()
    options = {"max_tokens": K} if mode == "constant_length" else {}
    counting = getattr(aggregate, mode)(count_empty=True, **options)
    ctx = proxpo.Context(denominators=count(batch))
    found = counting.apply(batch.logp, batch, ctx)[0]
    close(found, reduce(mode, batch.logp, batch) * 6 / 7)


@pytest.mark.parametrize("bad", [0.0, -3.0])
def test_constant_must_be_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="max_tokens must be positive"):
        aggregate.constant_length(max_tokens=bad)


def test_without_counts_the_reason_is_said() -> None:
    batch = batch_of()
    with pytest.raises(ValueError, match="denominators"):
        MODES["token_mean"].apply(batch.logp, batch, proxpo.Context())
    no_groups = count(batch.replace(group=None))
    with pytest.raises(ValueError, match="no count of prompts"):
        reduce("prompt_mean", batch.logp, batch, no_groups)
