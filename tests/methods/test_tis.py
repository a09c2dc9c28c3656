import math

import pytest
import torch
from helpers import (
    close,
    f64,
    loss_and_gradients,
    make_batch,
    method,
    mismatch,
    on_policy,
    policy_gradient,
)

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    clipped,
    grpo_terms,
    kept,
    mean,
    number,
    ratio,
    row,
    seq_mean_token_mean,
    times,
    tokens,
    z_scores,
)
from proxpo import Batch
from proxpo.stages.filter import reject
from proxpo.stages.weights import tis as tis_weights


def sampler_weights(b: Batch, *, sequence: bool = False) -> Numbers:
    q = {(i, t): number(b.old_logp[i, t]) - number(b.rollout_logp[i, t]) for i, t in tokens(b)}
    if sequence:
        q = {(i, t): sum(q[i, s] for s in row(b, i)) for i, t in q}
    return {k: math.exp(v) for k, v in q.items()}


def bounded_weights(
    b: Batch, *, floor: float = 0.0, cap: float = 1.2, mask: bool = False
) -> Numbers:
    w = sampler_weights(b)
    if mask:
        return {k: v if floor <= v <= cap else 0.0 for k, v in w.items()}
    return {k: min(max(v, floor), cap) for k, v in w.items()}


def tis_loss(w: Numbers, b: Batch) -> torch.Tensor:
    return seq_mean_token_mean(times(grpo_terms(b), w), b)


def tis_normalised(b: Batch) -> torch.Tensor:
    w = bounded_weights(b)
    return tis_loss({k: v / mean(list(w.values())) for k, v in w.items()}, b)


def tis_sequence(b: Batch) -> torch.Tensor:
    w = {k: min(max(v, 0.8), 1.5) for k, v in sampler_weights(b, sequence=True).items()}
    per_row = [w[i, row(b, i)[0]] for i in range(len(b.mask)) if row(b, i)]
    return tis_loss({k: v / mean(per_row) for k, v in w.items()}, b)


def tis_reject(b: Batch) -> torch.Tensor:
    """k1 of a row is the mean of log π_roll - log π_old, between log 0.9 and log 1.05."""
    a, w = z_scores(b), sampler_weights(b)
    w = {k: min(v, 2.0) for k, v in w.items()}
    k1 = {
        i: mean([number(b.rollout_logp[i, t]) - number(b.old_logp[i, t]) for t in row(b, i)])
        for i in range(len(b.mask))
        if row(b, i)
    }
    b = kept(b, lambda i, t: math.log(0.9) <= k1[i] <= math.log(1.05))
    x = clipped(ratio(b), a, 0.2, 0.2)
    return seq_mean_token_mean(times(x, w), b) if tokens(b) else 0.0 * b.logp.sum()


CASES = {
    "tis": Case("tis", {"cap": 1.2}, lambda b: tis_loss(bounded_weights(b), b)),
    "tis-icepop": Case(
        "tis",
        {"mode": "mask", "floor": 0.9, "cap": 1.3},
        lambda b: tis_loss(bounded_weights(b, floor=0.9, cap=1.3, mask=True), b),
    ),
    "tis-sequence": Case(
        "tis", {"level": "sequence", "cap": 1.5, "floor": 0.8, "normalise": True}, tis_sequence
    ),
    "tis-normalised": Case("tis", {"cap": 1.2, "normalise": True}, tis_normalised),
    "tis-bypass": Case(
        "tis",
        {"bypass": True},
        lambda b: seq_mean_token_mean(clipped(ratio(b, b.rollout_logp), z_scores(b), 0.2, 0.2), b),
    ),
    "tis-reject": Case("tis", {"reject_threshold": "0.9_1.05"}, tis_reject),
}


CONTEXT = proxpo.Context()


def weights(batch: object, **options: object) -> torch.Tensor:
    return tis_weights(**options).apply(batch, CONTEXT)[0]


@pytest.mark.checks("tis", "sampler = trainer: w = 1, the loss is unchanged, normalised or not")
@pytest.mark.parametrize(
    "options", [{}, {"normalise": True}, {"level": "sequence"}, {"mode": "mask"}]
)
def test_no_mismatch(options: dict) -> None:
    batch = make_batch(1)
    batch = batch.replace(rollout_logp=batch.old_logp)
    value, grads = loss_and_gradients(method("tis", **options), batch)
    base = loss_and_gradients(method("grpo"), batch)
    close(value, base[0])
    close(grads, base[1])


@pytest.mark.checks("tis", "the gradient is w times the one without; no cap: importance sampling")
@pytest.mark.parametrize("cap", [1.1, math.inf])
def test_weight_multiplies_the_gradient(cap: float) -> None:
    batch = make_batch(1)
    w = (batch.old_logp - batch.rollout_logp).exp().clamp(max=cap)
    found = policy_gradient(method("tis", cap=cap), batch)
    close(found, w * policy_gradient(method("grpo"), batch))


def test_weight_leaves_the_kl_alone() -> None:
    batch = make_batch(1)
    settings = {"regularisers": "kl_to_ref", "regularisers.kl_to_ref.coef": 0.5}
    part = policy_gradient(method("tis", **settings), batch) - policy_gradient(method("tis"), batch)
    plain = policy_gradient(method("grpo", kl_coef=0.5), batch) - policy_gradient(
        method("grpo"), batch
    )
    close(part, plain)


@pytest.mark.checks("tis", "judged token by token, normalised weights have mean 1 over tokens")
@pytest.mark.parametrize("level", ["geometric", "sequence"])
def test_normalised_weights_of_responses_judged_by_token(level: str) -> None:
    """The first token of a response says nothing of the others, which may be dropped or not."""
    batch = mismatch([[2.0, 0.1, -0.1, 0.2], [0.1, 0.0, 3.0, -0.2]])
    options = {"mode": "mask", "judge": "token", "cap": 1.5, "floor": 0.5}
    plain = weights(batch, level=level, **options)
    assert ((plain > 0) == torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]]).bool()).all()
    close(weights(batch, level=level, normalise=True, **options), plain / plain.mean())


@pytest.mark.checks("tis", "0 ≤ w ≤ C; normalised weights have mean 1")
def test_range_and_mean() -> None:
    batch = make_batch(1, spread=1.0)
    w = weights(batch, cap=1.5)
    assert w.min() >= 0
    assert w.max() == 1.5
    assert w[batch.mask].min() < 1
    close(weights(batch, cap=1.5, normalise=True)[batch.mask].mean(), 1.0)
    rows = weights(batch, cap=1.5, normalise=True, level="sequence")[:, 0]
    close(rows.mean(), 1.0)
    floored = weights(batch, cap=1.5, floor=0.5)
    assert floored[batch.mask].min() == 0.5


@pytest.mark.checks("tis", "sequence weight: the product of the tokens'; alone in a row, its own")
def test_sequence_level() -> None:
    batch = mismatch([[0.1, 0.2, -0.4], [0.3, 9.0, 9.0]], mask=[[1, 1, 1], [1, 0, 0]])
    free = {"cap": math.inf}
    token, row = weights(batch, **free), weights(batch, level="sequence", **free)
    close(row[0], token[0].prod())
    close(row[1], token[1, 0])
    close(weights(batch, level="geometric", **free)[0], math.exp(-0.1 / 3))


@pytest.mark.checks("tis", "IcePop with [0, ∞) is uncapped; with [1, 1] it keeps exact matches")
def test_icepop() -> None:
    batch = mismatch([[0.0, 0.5, -0.5, 0.1]])
    free = weights(batch, cap=math.inf)
    close(weights(batch, mode="mask", floor=0.0, cap=math.inf), free)
    close(weights(batch, mode="mask", floor=1.0, cap=1.0), f64([[1.0, 0.0, 0.0, 0.0]]))
    kept = weights(batch, mode="mask", floor=0.9, cap=1.2)
    close(kept, f64([[1.0, 0.0, 0.0, math.exp(0.1)]]))  # kept weights are not clipped


def test_masked_weights_keep_the_denominator() -> None:
    batch = mismatch([[0.0, 0.9]])
    close(policy_gradient(method("tis", mode="mask", cap=2.0), batch), f64([[-0.5, 0.0]]))
    rejected = method("tis", reject_threshold="0.9_1.1", reject_statistic="token")
    close(policy_gradient(rejected, batch), f64([[-1.0, 0.0]]))


@pytest.mark.checks("tis", "bypass equals the decoupled form with old = sampler and w = 1")
def test_bypass() -> None:
    batch = make_batch(1)
    found = loss_and_gradients(method("tis", bypass=True), batch)
    same = batch.replace(old_logp=batch.rollout_logp)
    expected = loss_and_gradients(method("tis"), same)
    close(found[0], expected[0])
    close(found[1], expected[1])
    twice = method("tis", bypass=True, **{"weights+": "tis"})  # counts the mismatch twice
    assert not torch.allclose(policy_gradient(twice, batch), found[1]["logp"])


def test_criteria_are_anded() -> None:
    batch = make_batch(1)
    rules = [reject(statistic="token", threshold=h) for h in ("0.8_1.1", "0.95_1.3")]
    both = proxpo.prepare(method("grpo", filter=rules), batch).batch.mask
    one, two = (rule.apply(batch, CONTEXT)[0] for rule in rules)
    assert torch.equal(both, batch.mask & one & two)
    assert both.any()


def test_everything_rejected_is_zero() -> None:
    batch = make_batch(1)
    made = method("tis", reject_estimator="k2", reject_threshold=0.0)
    value, grads = loss_and_gradients(made, batch)
    assert value == 0
    assert grads["logp"].eq(0).all()


def test_any_recipe_can_have_the_weight() -> None:
    batch = make_batch(1)
    w = (batch.old_logp - batch.rollout_logp).exp().clamp(max=3.0)
    made = method("dapo", **{"weights+": "tis", "weights.tis.cap": 3})
    close(policy_gradient(made, batch), w * policy_gradient(method("dapo"), batch))
    assert on_policy(batch).rollout_logp is not None


@pytest.mark.checks(
    "tis", "a response judged by its geometric mean keeps its token weights uncapped"
)
def test_judged_by_the_geometric_mean():
    logp = torch.zeros(2, 2, dtype=torch.float64)
    rollout = torch.tensor([[-2.0, 1.8], [-2.0, -1.0]], dtype=torch.float64)  # means 0.1 and 1.5
    batch = proxpo.Batch(
        logp=logp,
        old_logp=logp,
        rollout_logp=rollout,
        mask=torch.ones(2, 2, dtype=torch.bool),
        advantages=torch.ones(2, dtype=torch.float64),
    )
    stage = proxpo.make_stage("weights", "tis", mode="mask", judge="geometric", floor=0.5, cap=2.0)
    weights, _ = stage.apply(batch, proxpo.Context())
    expected = torch.stack([(-rollout[0]).exp(), torch.zeros(2, dtype=torch.float64)])
    torch.testing.assert_close(weights, expected)


def test_tokens_bounded_before_they_are_pooled():
    q = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    zeros = torch.zeros_like(q)
    batch = proxpo.Batch(
        logp=zeros, old_logp=q, rollout_logp=zeros, mask=torch.ones(1, 2, dtype=torch.bool)
    )
    stage = proxpo.make_stage("weights", "tis", level="geometric", cap=2.0, truncate_tokens=True)
    weights, _ = stage.apply(batch, proxpo.Context())
    expected = (2.0 * q[0, 1].exp()).sqrt()
    torch.testing.assert_close(weights, expected.expand(1, 2))


def test_sum_is_clamped_not_the_tokens() -> None:
    batch = mismatch([[15.0, 15.0, -12.0]])
    close(weights(batch, level="sequence", cap=math.inf), math.exp(18.0))
    batch = mismatch([[15.0, 15.0, 15.0]])
    close(weights(batch, level="sequence", cap=math.inf), math.exp(20.0))


def test_missing_sampler_probability_counts_as_agreement() -> None:
    batch = mismatch([[math.nan, 0.4]])
    close(weights(batch), f64([[1.0, math.exp(0.4)]]))
