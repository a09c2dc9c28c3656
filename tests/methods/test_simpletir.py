from typing import Any

import pytest
import torch
from helpers import advantages, close, loss_and_gradients, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    clipped,
    everywhere,
    groups,
    k3,
    kept,
    mean,
    number,
    plus,
    ratio,
    row,
    std,
    token_mean,
)
from proxpo import Batch
from proxpo.inspection import inspect_batch
from proxpo.stages.prompts import within_reach
from proxpo.stages.prune import is_void
from proxpo.types import Context


def z_scores_of(b: Batch, counted: list[bool]) -> Numbers:
    """Standardised among the counted members of the group; 0 for the others."""
    out = dict.fromkeys(range(len(b.mask)), 0.0)
    for members in groups(b).values():
        mine = [i for i in members if counted[i]]
        r = [number(b.rewards[i]) for i in mine]
        for i, x in zip(mine, r):
            out[i] = x if len(r) == 1 else (x - mean(r)) / (std(r) + 1e-6)
    return everywhere(out, b)


def simpletir(b: Batch, *, nonvoid: bool, cut: bool, prune: bool = True, dual: float = 3.0) -> Any:
    void, long = b.void.tolist(), b.truncated.tolist()
    counted = [
        bool(row(b, i)) and not (nonvoid and void[i]) and not (cut and long[i])
        for i in range(len(void))
    ]
    a = z_scores_of(b, counted)
    rest = kept(b, lambda i, t: not (prune and void[i]) and not (cut and long[i]))
    return rest, clipped(ratio(rest), a, 0.2, 0.28, dual=dual)


def simpletir_loss(b: Batch, **options: Any) -> torch.Tensor:
    rest, x = simpletir(b, **options)
    return token_mean(x, rest)


def simpletir_strict(b: Batch) -> torch.Tensor:
    rest, x = simpletir(b, nonvoid=True, cut=True)
    return token_mean(plus(x, (0.1, k3(rest, b.ref_logp))), rest)


CASES = {
    "simpletir": Case(
        "simpletir", {"dual": 1.2}, lambda b: simpletir_loss(b, nonvoid=False, cut=False, dual=1.2)
    ),
    "simpletir-nonvoid": Case(
        "simpletir",
        {"statistics": "nonvoid", "drop_truncated": True, "kl_coef": 0.1},
        simpletir_strict,
    ),
    "simpletir-unfiltered": Case(
        "simpletir",
        {"filter_void": False},
        lambda b: simpletir_loss(b, nonvoid=False, cut=False, prune=False),
    ),
}


@pytest.fixture
def batch() -> Batch:
    made = make_batch(1)
    assert 0 < made.void.sum() < len(made.void)
    return made


def with_void(batch: Batch, *rows: int) -> Batch:
    void = torch.zeros_like(batch.void)
    void[list(rows)] = True
    return batch.replace(void=void)


@pytest.mark.checks("simpletir", "no void response: GRPO with dual clip, token mean, tools masked")
def test_without_void_turns(batch: Batch) -> None:
    batch = with_void(batch)
    grpo = method("grpo", clip_high=0.28, dual=3.0, aggregate="token_mean")
    value, grads = loss_and_gradients(method("simpletir"), batch)
    expected, expected_grads = loss_and_gradients(grpo, batch)
    close(value, expected)
    close(grads, expected_grads)


@pytest.mark.checks("simpletir", "gradient 0 on void rows and tool tokens, ΣM_all/ΣM elsewhere")
def test_gradient_of_the_rest(batch: Batch) -> None:
    found = policy_gradient(method("simpletir"), batch)
    plain = policy_gradient(method("simpletir", filter_void=False), batch)
    assert found[batch.void].eq(0).all()
    assert found[~batch.mask].eq(0).all()
    assert plain[batch.void].abs().sum() > 0
    factor = batch.mask.sum().double() / batch.mask[~batch.void].sum()
    close(found[~batch.void], plain[~batch.void] * factor)


@pytest.mark.checks("simpletir", "advantages do not depend on which responses are void")
def test_advantages_stay(batch: Batch) -> None:
    all_of_them = advantages(method("simpletir", filter_void=False), batch)
    for rows in ((), (0,), (0, 1, 5)):
        other = with_void(batch, *rows)
        found = advantages(method("simpletir"), other)
        close(found[~other.void], all_of_them[~other.void])


def test_paper_text_takes_them_out_of_the_statistics(batch: Batch) -> None:
    other = with_void(batch, 0)
    found = advantages(method("simpletir", statistics="nonvoid"), other)
    assert (found[1:3] - advantages(method("simpletir"), other)[1:3]).abs().max() > 0.1


@pytest.mark.checks(
    "simpletir", "a response without tokens (over-long) leaves its group's statistics"
)
def test_overlong(batch: Batch) -> None:
    batch, mask = with_void(batch), batch.mask.clone()
    mask[0] = False
    made = method("simpletir")
    before, after = advantages(made, batch), advantages(made, batch.replace(mask=mask))
    assert (before[1:3] - after[1:3]).abs().max() > 0.1
    close(after[3:], before[3:])
    cut = batch.replace(truncated=torch.arange(9) == 0)
    close(advantages(method("simpletir", drop_truncated=True), cut), after)


def test_everything_void(batch: Batch) -> None:
    value, grads = loss_and_gradients(method("simpletir"), with_void(batch, *range(9)))
    assert value == 0
    assert grads["logp"].eq(0).all()


@pytest.mark.parametrize(
    ("turn", "void"),
    [
        ("```python\nx\n```", False),
        ("```py\nx = 1\ny = 2\n```", False),
        ("so\n```\nprint(1)\n```\nand then", False),
        ("```python\nraise ValueError\n```", False),
        ("```python\nx", True),
        ("```python x\n```", True),
        ("```python\nx```", True),
        (r"so it is \boxed{1}", False),
        (r"so it is \boxed", True),
        ("plain prose", True),
        ("", True),
    ],
)
@pytest.mark.checks("simpletir", "a complete code block or \\boxed{ is not void; all else is")
def test_detector(turn: str, void: bool) -> None:
    assert is_void(turn) is void


def keeps(correct: list[int], **options: object) -> bool:
    rewards = torch.tensor(correct).double()
    shape = (len(correct), 1)
    batch = Batch(
        logp=torch.zeros(shape).double(),
        mask=torch.ones(shape, dtype=torch.bool),
        rewards=rewards,
        group=torch.zeros(len(correct), dtype=torch.int64),
    )
    found, _ = within_reach(**options).apply(batch, Context())
    assert found.all() or not found.any()
    return bool(found.all())


def test_prompts_within_reach() -> None:
    assert keeps([1] + 9 * [0])  # exactly 0.1 is within
    assert not keeps([1] + 10 * [0])
    assert keeps(9 * [1] + [0])
    assert not keeps(4 * [1])
    assert not keeps(4 * [1], high=1.0)  # rewards without spread
    assert not keeps([1, 0, 0])
    assert keeps([1, 0, 0], min_responses=3)
    assert "within_reach" in str(method("simpletir", group_filter="resample").prompts)


def test_what_is_missing_is_said(batch: Batch) -> None:
    with pytest.raises(proxpo.ProxpoError, match=r"void_turns needs .*'void'.*environment"):
        proxpo.loss_fn(method("simpletir"))(batch.replace(void=None))


@pytest.mark.parametrize(("slug", "options"), [("simpletir", {}), ("cppo", {"rate": 0.5})])
def test_inspect_shows_the_advantages_of_responses_that_leave(slug: str, options: dict) -> None:
    batch = with_void(make_batch(1), 0, 4)
    shown = inspect_batch(method(slug, **options), batch)
    filled = batch.mask.any(dim=1)
    eps = method(slug).advantage.options["eps"]
    close(shown.advantages, inspect_batch(method("grpo", eps=eps), batch).advantages)
    assert not shown.mask[filled].any(dim=1).all()
    assert (shown.dloss_dlogp[~shown.mask] == 0).all()
