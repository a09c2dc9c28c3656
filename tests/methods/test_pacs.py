import math
from typing import Any

import pytest
import torch
from helpers import (
    advantages,
    close,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    on_policy,
    per_row,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import exp, groups, log_ratio, mean, row, tokens
from proxpo import Batch
from proxpo.stages.aggregate.labelled import Members
from proxpo.stages.aggregate.labelled import group_scores as supervised_scores
from proxpo.types import local


def label_weight(labels: list[bool], mine: bool, balance: str) -> float:
    if balance == "question":
        same = sum(one == mine for one in labels)
        return 1.0 if same == len(labels) else len(labels) / (2 * same)
    return {"none": 1.0, "only_positive": float(mine), "only_negative": float(not mine)}[balance]


def group_scores(r: list[Any], score: str) -> list[Any]:
    if score == "plain":
        return r
    if score == "leave_one_out":
        return [x - mean([y for j, y in enumerate(r) if j != i]) for i, x in enumerate(r)]
    u = [x - mean(r) for x in r]
    if score == "centred":
        return u
    spread = torch.sqrt(sum(x * x for x in u) / (len(u) - 1))
    return [x / (spread + 1e-6) for x in u]


def pacs(b: Batch, *, score: str, balance: str, beta: float = 1.0, averaged: bool = False) -> Any:
    d = {(i, t): b.logp[i, t] for i, t in tokens(b)} if averaged else log_ratio(b)
    terms = []
    for members in groups(b).values():
        r = [beta * sum(d[i, t] for t in row(b, i)) / (len(row(b, i)) if averaged else 1)
             for i in members]  # fmt: skip
        labels = [bool(b.correct[i]) for i in members]
        for psi, y in zip(group_scores(r, score), labels):
            bce = torch.log(1 + exp(-psi)) if y else torch.log(1 + exp(psi))
            terms.append(label_weight(labels, y, balance) * bce)
    return mean(terms)


CASES = {
    "pacs": Case(
        "pacs", {"singleton": "drop"}, lambda b: pacs(b, score="leave_one_out", balance="question")
    ),
    "pacs-standardised": Case(
        "pacs",
        {"singleton": "drop", "score": "standardised", "balance": "only_positive"},
        lambda b: pacs(b, score="standardised", balance="only_positive"),
    ),
    "pacs-centred": Case(
        "pacs",
        {"singleton": "drop", "score": "centred", "balance": "only_negative", "beta": 0.5},
        lambda b: pacs(b, score="centred", balance="only_negative", beta=0.5),
    ),
    "pacs-plain": Case(
        "pacs",
        {"singleton": "drop", "score": "plain", "balance": "none", "proxy": "mean_logp"},
        lambda b: pacs(b, score="plain", balance="none", averaged=True),
    ),
}


SLUG = "pacs"


def labelled(*labels: list[int], tokens: int = 3, **options: float) -> Batch:
    """One group for each list of labels; full rows."""
    rows = sum(len(one) for one in labels)
    batch = make_batch(3, groups=1, size=rows, tokens=tokens, holes=False, **options)
    flat = [y for one in labels for y in one]
    return batch.replace(
        mask=torch.ones_like(batch.mask),
        group=torch.tensor([g for g, one in enumerate(labels) for _ in one]),
        rewards=f64(flat),
        correct=None,
    )


def proxy_gradient(batch: Batch, **options: object) -> torch.Tensor:
    """dloss/dr̂ at β = 1: equal on all tokens of a response."""
    return per_row(policy_gradient(method(SLUG, **options), batch), batch)


def scores(batch: Batch, score: str) -> torch.Tensor:
    """ψ as the loss has it."""
    proxy = (batch.logp - batch.old_logp).sum(1)
    one = torch.ones_like(proxy)
    at = Members(one, one, batch.group, local)
    at = at._replace(n=at.sums(one)[0])
    return supervised_scores(proxy, at, score, 1e-6)[0]


@pytest.mark.checks(SLUG, "on-policy every ψ is 0 and the loss is ln 2 · mean(w)")
def test_on_policy_value() -> None:
    batch = on_policy(labelled([1, 0, 0, 0], [1, 1, 1]))
    found, _ = loss_and_gradients(method(SLUG), batch)
    weights = f64([2, 2 / 3, 2 / 3, 2 / 3, 1, 1, 1])
    close(found, math.log(2) * weights.mean())
    close(per_row(advantages(method(SLUG), batch), batch).abs(), weights)


@pytest.mark.checks(SLUG, "on-policy the gradient is REINFORCE with +1/n_pos and -1/n_neg")
def test_on_policy_gradient() -> None:
    batch = on_policy(labelled([1, 0, 0, 0, 1]))
    n, right = 5, 2
    per_right = -(1 / n) * (n / (n - 1)) * n / (4 * right)
    per_wrong = (1 / n) * (n / (n - 1)) * n / (4 * (n - right))
    expected = f64([per_right, per_wrong, per_wrong, per_wrong, per_right])
    close(proxy_gradient(batch), expected)


@pytest.mark.checks(SLUG, "one label in a group: no gradient on-policy, some once ψ differ")
def test_single_label() -> None:
    batch = labelled([1, 1, 1])
    close(proxy_gradient(on_policy(batch)), f64([0, 0, 0]))
    assert proxy_gradient(batch).abs().min() > 1e-3


@pytest.mark.checks(SLUG, "gradients of a group add up to 0; r̂ may be shifted by a constant")
@pytest.mark.parametrize("score", ["leave_one_out", "centred", "standardised"])
def test_shift(score: str) -> None:
    batch = labelled([1, 0, 0, 1], [0, 1, 1])
    grad = proxy_gradient(batch, score=score)
    close(grad[:4].sum(), 0.0)
    close(grad[4:].sum(), 0.0)
    shift = torch.where(batch.group == 0, 0.7, -0.2)[:, None]
    moved = batch.replace(old_logp=batch.old_logp + shift)
    for found, expected in zip(
        loss_and_gradients(method(SLUG, score=score), moved),
        loss_and_gradients(method(SLUG, score=score), batch),
    ):
        close(found, expected)


@pytest.mark.checks(SLUG, "scores are compared with the others of the group: Σψ = 0")
@pytest.mark.parametrize("score", ["leave_one_out", "standardised", "centred"])
def test_scores_of_a_group_cancel(score: str) -> None:
    batch = labelled([1, 0, 0, 1], [0, 1, 1])
    psi = scores(batch, score)
    close(psi[:4].sum(), 0.0)
    close(psi[4:].sum(), 0.0)
    agrees = (psi * (2 * batch.rewards - 1) > 0).double().mean()
    close(proxpo.loss_fn(method(SLUG, score=score))(batch).metrics["score/agrees"], agrees)


def test_score_leaves_its_own_response_out() -> None:
    batch = labelled([1, 0, 0, 1], [0, 1, 1])
    d = (batch.logp - batch.old_logp).sum(1)
    others = [(batch.group == g) & (torch.arange(len(d)) != i) for i, g in enumerate(batch.group)]
    expected = torch.stack([d[i] - d[rest].mean() for i, rest in enumerate(others)])
    close(scores(batch, "leave_one_out"), expected)


@pytest.mark.checks(SLUG, "β scales the gradient at ψ = 0; |dloss/dr̂| ≤ 2 max w / N everywhere")
def test_bounded() -> None:
    batch = on_policy(labelled([1, 0, 0, 0]))
    once, thrice = (policy_gradient(method(SLUG, beta=beta), batch) for beta in (1.0, 3.0))
    close(thrice, 3 * once)
    for spread in (0.2, 5.0, 80.0):
        far = labelled([1, 0, 0, 0], [1, 1, 0], spread=spread)
        assert proxy_gradient(far).abs().max() <= 2 * 2.0 / 7 + 1e-12


def test_labels_come_from_correct_or_from_rewards_of_0_and_1() -> None:
    batch = labelled([1, 0, 1])
    value = loss_and_gradients(method(SLUG), batch)[0]
    shaped = batch.replace(rewards=f64([0.3, 0.2, 0.9]), correct=batch.rewards == 1)
    close(loss_and_gradients(method(SLUG), shaped)[0], value)
    minus = batch.replace(rewards=2 * batch.rewards - 1)
    close(loss_and_gradients(method(SLUG), minus)[0], value)
    with pytest.raises(ValueError, match=r"reward of response 0 is 0.3.*'correct'"):
        proxpo.loss_fn(method(SLUG))(shaped.replace(correct=None))


def test_one_response_to_a_prompt() -> None:
    batch = labelled([1, 0], [1])
    with pytest.raises(ValueError, match="response 2 is the only one to its prompt"):
        proxpo.loss_fn(method(SLUG))(batch)
    grad = policy_gradient(method(SLUG, singleton="drop"), batch)
    assert grad[2].eq(0).all()
    assert grad[0].ne(0).all()


def test_a_response_without_a_reward_is_no_part_of_its_group() -> None:
    batch = labelled([1, 0, 1, 0])
    missing = batch.replace(rewards=f64([1, 0, 1, math.nan]))
    three = batch.rows(slice(0, 3))
    close(policy_gradient(method(SLUG), missing)[:3] * 4, policy_gradient(method(SLUG), three) * 3)
    assert policy_gradient(method(SLUG), missing)[3].eq(0).all()


def test_token_terms_are_refused() -> None:
    with pytest.raises(ValueError, match="compares whole responses"):
        method(SLUG, **{"regularisers": "kl_to_ref"})
    with pytest.raises(ValueError, match="beta must be positive"):
        method(SLUG, beta=0)
