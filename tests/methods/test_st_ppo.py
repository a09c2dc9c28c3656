import math
from collections.abc import Callable

import pytest
import torch
from helpers import close, crafted, f64, loss_and_gradients, make_batch, method, on_policy
from helpers import policy_gradient as gradient_of
from torch import Tensor

import proxpo
from methods._case import Case
from methods.loops import (
    Terms,
    clipped_between,
    exp,
    gae,
    k3,
    log_ratio,
    mean,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    token_mean,
    token_rewards,
    tokens,
    value_terms,
    whitened,
    z_scores,
)
from methods.toy_updates import ToyUpdates
from proxpo import Batch, Recipe
from proxpo.inspection import inspect_batch
from proxpo.stages.ratio import sequence, turn
from proxpo.stages.schedule.clipping_bias import clipping_bias
from proxpo.types import Context


def measured_loss(made: Recipe, batch: Batch, ctx: Context) -> Tensor:
    """The scalar whose gradient is C(θ), of a prepared batch or of a cut of it."""
    return proxpo.policy_loss(made.schedule.apply.measured(made), batch, ctx).value


def mean_ratio(b: Batch, same: Callable[[int, int, int], bool]) -> Terms:
    d, out = log_ratio(b), {}
    for i, t in tokens(b):
        out[i, t] = exp(mean([d[i, s] for s in row(b, i) if same(i, s, t)]))
    return out


def by_field(b: Batch) -> Terms:
    return mean_ratio(b, lambda i, s, t: bool(b.turn[i, s] == b.turn[i, t]))


def by_run(b: Batch) -> Terms:
    return mean_ratio(b, lambda i, s, t: bool(b.mask[i, min(s, t) : max(s, t) + 1].all()))


def st_ppo(b: Batch, w: Terms, clip: float) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=1.0, lam=1.0)
    x = clipped_between(w, whitened(raw), lambda k: (1 - clip, 1 + clip))
    return seq_mean_token_mean(plus(x, (1.0, value_terms(b, raw, clip=0.5))), b)


def st_ppo_group(b: Batch) -> torch.Tensor:
    x = clipped_between(by_field(b), z_scores(b), lambda k: (0.9, 1.1))
    return token_mean(plus(x, (0.1, k3(b, b.ref_logp))), b)


CASES = {
    "st-ppo": Case(
        "st-ppo", {"clip_low": 0.05, "clip_high": 0.05}, lambda b: st_ppo(b, by_field(b), 0.05)
    ),
    "st-ppo-group": Case(
        "st-ppo",
        {"critic": False, "average": "token", "clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.1},
        st_ppo_group,
    ),
    "s-ppo": Case("st-ppo", {"variant": "s-ppo"}, lambda b: st_ppo(b, ratio(b), 0.2)),
    "turn-ppo": Case(
        "st-ppo",
        {"variant": "turn-ppo", "split": "mask", "clip_low": 0.05, "clip_high": 0.05},
        lambda b: st_ppo(b, by_run(b), 0.05),
    ),
}


SLUG = "st-ppo"
WIDE = {"critic": False, "clip_low": 9.0, "clip_high": 9.0}


def turn_ratio(batch: Batch, split: str = "turn") -> Tensor:
    return torch.where(batch.mask, turn(split=split).apply(batch, Context())[0], 0.0)


@pytest.mark.checks(SLUG, "every turn of one token: token PPO")
def test_turns_of_one_token() -> None:
    batch = make_batch(1, spread=0.4)
    batch = batch.replace(turn=torch.arange(6).expand(9, 6))
    found = loss_and_gradients(method(SLUG, variant="turn-ppo"), batch)
    token = loss_and_gradients(method("ppo", aggregate="seq_mean_token_mean"), batch)
    close(found[0], token[0])
    close(found[1], token[1])


@pytest.mark.checks(SLUG, "one turn per response: GSPO's ratio")
def test_one_turn() -> None:
    batch = make_batch(1, spread=0.4)
    batch = batch.replace(turn=torch.full((9, 6), 3))
    close(turn_ratio(batch), torch.where(batch.mask, sequence().apply(batch, Context())[0], 0.0))
    made = method(SLUG, critic=False, clip_low=0.03, clip_high=0.03)
    close(
        gradient_of(made, batch), gradient_of(method("gspo", clip_low=0.03, clip_high=0.03), batch)
    )


@pytest.mark.checks(SLUG, "∂J/∂log π is the same for all tokens of a turn, however A is split")
def test_equal_gradient_inside_a_turn() -> None:
    turns = torch.tensor([[0, 0, 0, 1, 1]])
    z = [[0.2, -0.1, 0.3, 0.1, 0.1]]
    one = crafted(z, [[1.0, -0.5, 2.5, 1.0, 0.0]], turn=turns)
    other = crafted(z, [[1.0, 1.0, 1.0, -1.0, 2.0]], turn=turns)
    for batch in (one, other):
        found = gradient_of(method(SLUG, **WIDE), batch)
        w = f64([0.4 / 3, 0.1]).exp()
        close(found, -f64([[w[0]] * 3 + [w[1] * 0.5] * 2]) / 5)


@pytest.mark.checks(SLUG, "on-policy: the policy gradient with the advantage averaged per turn")
def test_on_policy() -> None:
    batch = on_policy(make_batch(1))
    batch = batch.replace(advantages=torch.sin(torch.arange(54.0).double()).view(9, 6))
    made = method(SLUG, critic=False)
    ready = proxpo.prepare(made, batch)
    a = ready.batch.advantages
    averaged = torch.zeros_like(a)
    for i in range(9):
        for k in batch.turn[i].unique():
            inside = batch.mask[i] & (batch.turn[i] == k)
            averaged[i][inside] = a[i][inside].mean() if inside.any() else 0.0
    close(gradient_of(made, batch), -averaged / 9 / batch.mask.sum(1, keepdim=True))
    metrics = inspect_batch(made, batch).metrics
    assert metrics["inspect/rescale_norm_logp"] == 0
    assert metrics["inspect/rescale_factor_logp"] == 1.0


@pytest.mark.checks(SLUG, "an observation token inside a turn splits it; token ratios do not care")
def test_observation_splits_a_turn() -> None:
    whole = crafted([[0.1, 0.3, 0.5]], [1.0], turn=torch.tensor([[0, 0, 0]]))
    z, seen = [[0.1, 99.0, 0.3, 0.5]], [[1, 0, 1, 1]]
    cut = crafted(z, [1.0], mask=seen, turn=torch.tensor([[0, 9, 1, 1]]))
    old = cut.replace(logp=whole.logp[:, [0, 0, 1, 2]], old_logp=whole.old_logp[:, [0, 0, 1, 2]])
    for split in ("turn", "mask"):
        close(turn_ratio(old, split)[0, [0, 2, 3]], f64([0.1, 0.4, 0.4]).exp())
    close(turn_ratio(whole, "mask"), f64([[0.3] * 3]).exp())
    token = method(SLUG, variant="s-ppo", **WIDE)
    close(gradient_of(token, old)[0, [0, 2, 3]], gradient_of(token, whole)[0])


def test_an_empty_response_contributes_nothing() -> None:
    batch = make_batch(1)
    mask = batch.mask.clone()
    mask[2] = False
    assert gradient_of(method(SLUG), batch.replace(mask=mask))[2].eq(0).all()


# The normaliser -----------------------------------------------------------------------------------


class Linear:
    """log π of each token as a linear function of three parameters."""

    def __init__(self, batch: Batch):
        self.batch, g = batch, torch.Generator().manual_seed(0)
        self.inputs = torch.randn(*batch.mask.shape, 3, generator=g, dtype=torch.float64)
        self.theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def gradients(self, made: Recipe, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """∇J (as a loss) and C over the parameters."""
        logp = self.batch.logp + self.inputs @ self.theta
        ready = proxpo.prepare(made, self.batch.replace(logp=logp, advantages=advantages))
        loss = proxpo.policy_loss(made, ready.batch, ready.ctx).value
        measured = measured_loss(made, ready.batch, ready.ctx)
        (g,) = torch.autograd.grad(loss, self.theta, retain_graph=True)
        (c,) = torch.autograd.grad(measured, self.theta)
        return g, c

    def direction(self, made: Recipe, advantages: Tensor) -> Tensor:
        g, c = self.gradients(made, advantages)
        return made.schedule.apply.factor(float(c.norm())) * g


def model() -> tuple[Linear, Tensor]:
    batch = make_batch(2, spread=0.6)
    return Linear(batch), torch.linspace(-1.3, 1.1, 9).double()


@pytest.mark.checks(SLUG, "the clipped and the full gradient differ by C(θ)")
@pytest.mark.parametrize("variant", ["st-ppo", "s-ppo"])
def test_decomposition(variant: str) -> None:
    linear, a = model()
    made = method(SLUG, variant=variant, critic=False)
    g, c = linear.gradients(made, a)
    full, nothing = linear.gradients(method(SLUG, variant=variant, **WIDE), a)
    close(-g, -full - c)
    assert c.norm() > 1e-3
    assert nothing.eq(0).all()


@pytest.mark.checks(SLUG, "the direction is ∇J/‖C‖: scaling all advantages does not change it")
@pytest.mark.parametrize("variant", ["st-ppo", "s-ppo"])
def test_invariant_to_the_scale_of_advantages(variant: str) -> None:
    linear, a = model()
    made = method(SLUG, variant=variant, critic=False)
    g, c = linear.gradients(made, a)
    close(linear.direction(made, a), g / c.norm())
    for scale in (1e-3, 70.0):
        close(linear.direction(made, scale * a), linear.direction(made, a))
    plain = method(SLUG, variant=variant, critic=False, norm_floor=1e9)
    close(linear.direction(plain, a), g / 1e9)


@pytest.mark.checks(SLUG, "a wide clip: nothing clipped, the gradient stays as it is")
def test_identity_without_clipping() -> None:
    linear, a = model()
    made = method(SLUG, **WIDE)
    close(linear.direction(made, a), linear.gradients(made, a)[0])


@pytest.mark.checks(SLUG, "floor 0 divides literally and may amplify; floor 1 never does")
def test_floor() -> None:
    literal, guarded = clipping_bias().apply, clipping_bias(norm_floor=1.0).apply
    close([literal.factor(n) for n in (0.02, 4.0)], [50.0, 0.25])
    close([guarded.factor(n) for n in (0.02, 4.0)], [1.0, 0.25])
    assert literal.factor(0.0) == guarded.factor(0.0) == 1.0
    assert clipping_bias(norm_floor=0.1, when_unclipped="floor").apply.factor(0.0) == 10.0
    assert literal.factor(math.inf) == literal.factor(math.nan) == 1.0


@pytest.mark.checks(SLUG, "A = 0 is never clipped; the sides are those of PPO's clip")
def test_clipped_set() -> None:
    batch = crafted([[0.5, 0.5, 0.5, -0.5, -0.5, -0.5]], [[1.0, -1.0, 0.0, 1.0, -1.0, 0.0]])
    r = (batch.logp - batch.old_logp).exp()
    term = clipping_bias().apply.term(r, batch, Context())[0]
    close(term, r * f64([[1.0, 0, 0, 0, -1.0, 0]]))


def test_cuts_of_the_batch_add_up() -> None:
    batch = make_batch(2, spread=0.6)
    made = method(SLUG)
    ready = proxpo.prepare(made, batch)
    whole = measured_loss(made, ready.batch, ready.ctx)
    parts = [
        measured_loss(made, ready.batch.rows(torch.tensor(rows)), ready.ctx)
        for rows in ([8, 0, 4], [1, 2, 3, 5, 6, 7])
    ]
    close(sum(parts), whole)


def test_inspect_shows_the_proxy_over_tokens() -> None:
    batch = make_batch(2, spread=0.6)
    made = method(SLUG, clip_low=0.05, clip_high=0.05)
    found = inspect_batch(made, batch).metrics
    ready = proxpo.prepare(made, batch)
    a, w = ready.batch.advantages, turn_ratio(batch)
    clipped = ((a > 0) & (w > 1.05)) | ((a < 0) & (w < 0.95))
    lengths = batch.mask.sum(1, keepdim=True)
    per_token = torch.where(clipped, w * a, 0.0) / 9 / lengths
    slope = torch.zeros_like(a)  # of a turn's ratio: 1/|turn| from each of its tokens to each
    for i in range(9):
        for k in batch.turn[i].unique():
            inside = batch.mask[i] & (batch.turn[i] == k)
            if inside.any():
                slope[i][inside] = per_token[i][inside].sum() / inside.sum()
    close(found["inspect/rescale_norm_logp"], slope.norm())
    close(found["inspect/rescale_factor_logp"], 1 / slope.norm())
    assert not any("rescale" in name for name in inspect_batch(method("ppo"), batch).metrics)


def test_variants() -> None:
    assert method(SLUG).schedule.name == method(SLUG, variant="s-ppo").schedule.name
    assert method(SLUG, variant="turn-ppo").schedule is None
    assert method(SLUG, variant="s-ppo").ratio.name == "token"
    assert method(SLUG).value is not None
    assert method(SLUG, critic=False).value is None
    assert method("grpo", schedule="clipping_bias").schedule.options["norm_floor"] == 0.0


def test_turns_are_asked_for() -> None:
    batch = make_batch(1).replace(turn=None)
    with pytest.raises(ValueError, match="st-ppo: ratio=turn needs the batch field 'turn'"):
        proxpo.loss_fn(method(SLUG))(batch)
    assert proxpo.loss_fn(method(SLUG, split="mask"))(batch).value.isfinite()


@pytest.mark.parametrize(
    "option",
    [{"clip_low": -0.1, "clip_high": -0.1}, {"norm_floor": -1.0}, {"when_unclipped": "floor"}],
)
def test_refused(option: dict) -> None:
    with pytest.raises(ValueError, match=r"negative|positive"):
        method(SLUG, **option)


def test_only_the_policy_term_is_measured() -> None:
    batch = make_batch(2, spread=0.6)
    found = []
    for made in (method(SLUG), method(SLUG, kl_coef=0.7)):
        ready = proxpo.prepare(made, batch)
        found.append(measured_loss(made, ready.batch, ready.ctx))
    close(found[0], found[1])


def test_every_update_is_rescaled() -> None:
    made = method(SLUG)
    updates = ToyUpdates(count=3, recipe=made)
    assert made.schedule.apply(updates, Context()) == ({}, {})
    assert updates.calls == [("step", 3, None, True)]
    assert updates.rescales[0].loss.trust.apply == made.schedule.apply.term
    assert updates.rescales[0].factor(4.0) == 0.25


def test_only_the_names_of_turns_matter() -> None:
    batch = make_batch(1, spread=0.4)
    renamed = batch.replace(turn=7 - 3 * batch.turn)
    close(turn_ratio(renamed), turn_ratio(batch))
    spoilt = batch.replace(turn=torch.where(batch.mask, batch.turn, -(10**9)))
    close(turn_ratio(spoilt), turn_ratio(batch))
