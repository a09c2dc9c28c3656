from typing import Any

import pytest
import torch
from helpers import close, crafted, f64, make_batch, method, policy_gradient

import proxpo
from methods._case import Case
from methods.loops import (
    Numbers,
    Terms,
    bounded,
    clipped,
    k3,
    kept,
    larger,
    log_ratio,
    mean,
    number,
    ratio,
    row,
    smaller,
    token_mean,
    tokens,
    value_terms,
    whitened,
    z_scores,
)
from proxpo import Batch, Context, ProxpoError
from proxpo.types import Clock

SLUG = "foldact"
PLAIN: dict[str, Any] = {"drop": 0.0, "consistency_coef": 0.0, "kl_coef": 0.0, "critic": False}


def capped(x: Terms, cap: float) -> Terms:
    return {k: smaller(v, cap) for k, v in x.items()}


def separated(x: Terms, b: Batch, summary: float, action: float) -> Any:
    inside = [v for (i, t), v in x.items() if b.summary[i, t]]
    outside = [v for (i, t), v in x.items() if not b.summary[i, t]]
    return summary * mean(inside) + action * mean(outside)


def known(value: float) -> bool:
    return value != 0.0 and value >= -1e5


def consistency(b: Batch, kind: str) -> Any:
    terms = []
    for (i, t), d in log_ratio(b, b.full_logp).items():
        if known(number(b.full_logp[i, t])):
            value = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]
            terms.append(value)
    return mean(terms)


def verl_k3(b: Batch) -> Terms:
    return {k: bounded(x, -10.0, 10.0) for k, x in k3(b, b.ref_logp).items()}


def gae_of_episodes(b: Batch, *, gamma: float, lam: float) -> Numbers:
    """Over the tokens of all turns of an episode, one after the other."""
    chains: dict[tuple[int, int], list[int]] = {}
    for i in sorted(range(len(b.mask)), key=lambda i: int(b.step[i])):
        chains.setdefault((int(b.group[i]), int(b.episode[i])), []).append(i)
    out: Numbers = {}
    for turns in chains.values():
        value_next = advantage_next = 0.0
        for i in reversed(turns):
            for t in reversed(row(b, i)):
                reward = number(b.step_rewards[i]) if t == row(b, i)[-1] else 0.0
                value = number(b.old_values[i, t])
                delta = reward + gamma * value_next - value
                advantage_next = out[i, t] = delta + gamma * lam * advantage_next
                value_next = value
    return out


def foldact(b: Batch, *, gamma: float = 1.0, lam: float = 1.0) -> Any:
    rest = kept(b, lambda i, t: number(b.segment_draw[i]) >= 0.5)
    raw = gae_of_episodes(b, gamma=gamma, lam=lam)
    x = clipped(capped(ratio(rest), 10.0), whitened(raw), 0.2, 0.2)
    targets = {k: raw[k] for k in x}
    loss = separated(x, rest, 1.0, 1.0) + 0.01 * token_mean(verl_k3(rest), rest)
    return loss + consistency(rest, "k1") + token_mean(value_terms(rest, targets, clip=0.5), rest)


def flat(b: Batch) -> Any:
    """Dropped turns with the log-probability of the flattened sequence; cap and clip within."""

    def anchor(i: int) -> Any:
        return b.old_logp if number(b.segment_draw[i]) >= 0.4 else b.full_logp

    rest = kept(b, lambda i, t: known(number(anchor(i)[i, t])))
    a: Numbers = z_scores(b)
    x = {}
    for i, t in tokens(rest):
        r = smaller(torch.exp(b.logp[i, t] - number(anchor(i)[i, t])), 1.5)
        x[i, t] = larger(-a[i, t] * r, -a[i, t] * bounded(r, 0.9, 1.1))
    return separated(x, rest, 0.3, 0.7) + 0.1 * consistency(rest, "k3")


CASES = {
    SLUG: Case(SLUG, {}, foldact),
    "foldact-discounted": Case(
        SLUG, {"gamma": 0.9, "lam": 0.8}, lambda b: foldact(b, gamma=0.9, lam=0.8)
    ),
    "foldact-flat": Case(
        SLUG,
        {
            "drop": 0.4,
            "dropped": "flat",
            "summary": 0.3,
            "action": 0.7,
            "consistency_coef": 0.1,
            "estimator": "k3",
            "clip_low": 0.1,
            "clip_high": 0.1,
            "cap": 1.5,
            "kl_coef": 0.0,
            "critic": False,
        },
        flat,
    ),
}


@pytest.mark.checks(
    SLUG, "only summaries, or none, and λ = 1, λ_c = 0: the token mean of PPO's clip"
)
@pytest.mark.parametrize("value", [False, True])
def test_one_kind_is_ppo(value: bool) -> None:
    batch = make_batch(3, spread=0.6)
    batch = batch.replace(summary=torch.full_like(batch.mask, value))
    plain = method("grpo", **{"aggregate": "token_mean", "trust.cap": 10.0})
    close(policy_gradient(method(SLUG, **PLAIN), batch), policy_gradient(plain, batch))


@pytest.mark.checks(SLUG, "λ_s:λ_a = Σms : Σm(1-s), over Σm: the ordinary token mean")
def test_shares_as_weights_are_the_token_mean() -> None:
    batch = make_batch(3, spread=0.6)
    share = int((batch.mask & batch.summary).sum()) / int(batch.mask.sum())
    made = method(SLUG, **PLAIN, summary=share, action=1 - share)
    plain = method("grpo", **{"aggregate": "token_mean", "trust.cap": 10.0})
    close(policy_gradient(made, batch), policy_gradient(plain, batch))


@pytest.mark.checks(SLUG, "more summary tokens leave ∂L_act/∂logp as it is, and the reverse")
@pytest.mark.parametrize("summary", [True, False])
def test_kinds_do_not_dilute_each_other(summary: bool) -> None:
    z, kind = [[0.1, -0.1, 0.05, 0.0]], torch.tensor([[True, False, False, True]])
    batch = crafted(z, [[1.0, -1.0, 2.0, 0.5]], summary=kind, segment_draw=f64([0.9]))
    made = method(SLUG, **PLAIN)
    more = kind == summary
    columns = [0, 1, 2, 3, *more[0].nonzero()[:, 0].tolist()]
    longer = Batch(**{k: v[:, columns] if v.dim() > 1 else v for k, v in batch.items()})
    before, after = (policy_gradient(made, b)[:, :4] for b in (batch, longer))
    close(after[~more], before[~more])
    close(after[more], before[more] / 2)


@pytest.mark.checks(SLUG, "∂L_cons/∂logp = m/Σm over the rows of I, 0 elsewhere, for any full_logp")
def test_k1_pulls_nowhere() -> None:
    batch = make_batch(3).replace(advantages=torch.zeros(9).double())
    made = method(SLUG, drop=0.0, kl_coef=0.0, critic=False)
    inside = batch.mask & (batch.full_logp != 0)
    expected = inside.double() / inside.sum()
    for shift in (0.0, -2.0):
        moved = torch.where(batch.full_logp != 0, batch.full_logp + shift, 0.0)
        close(policy_gradient(made, batch.replace(full_logp=moved)), expected)
    pulling = method(SLUG, drop=0.0, kl_coef=0.0, critic=False, estimator="k2")
    d = batch.logp - batch.full_logp
    close(policy_gradient(pulling, batch), torch.where(inside, d * expected, 0.0))
    later = Context(clock=Clock(step=7))
    without = batch.replace(full_logp=None)  # every 100 steps, and not read between them
    assert not policy_gradient(made, without, later).any()
    assert made.needs() - made.needs(later.clock) == {"full_logp"}


@pytest.mark.checks(SLUG, "a ratio above 10 with A < 0 has no gradient, unlike plain PPO's")
def test_cap() -> None:
    batch = crafted([[2.4, 2.2]], [[-1.0, -1.0]], summary=[[False, True]], segment_draw=f64([0.9]))
    found = policy_gradient(method(SLUG, **PLAIN), batch)
    close(found, [[0.0, float(f64(2.2).exp())]])
    for cap in (100.0, None):
        assert policy_gradient(method(SLUG, **PLAIN, cap=cap), batch)[0, 0] > 10


@pytest.mark.checks(
    SLUG, "kept turns have log π_old of the folded context, dropped ones of the flat"
)
def test_segments() -> None:
    batch = make_batch(3).replace(segment_draw=f64([0.1, 0.9, 0.1] * 3))
    made = method(SLUG, drop=0.5, dropped="flat", critic=False)
    ready = proxpo.prepare(made, batch)
    r = made.ratio.apply(ready.batch, ready.ctx)[0]
    dropped = (batch.segment_draw < 0.5)[:, None] & ready.batch.mask
    close(r[dropped], (batch.logp - batch.full_logp).exp()[dropped])
    rest = ready.batch.mask & ~dropped
    close(r[rest], (batch.logp - batch.old_logp).exp()[rest])
    assert not ready.batch.mask[batch.full_logp.eq(0) & (batch.segment_draw < 0.5)[:, None]].any()
    skipped = proxpo.prepare(method(SLUG, drop=0.5, critic=False), batch).batch.mask
    assert torch.equal(skipped, batch.mask & (batch.segment_draw >= 0.5)[:, None])


@pytest.mark.parametrize("option", [{"drop": 1.0}, {"summary": -1.0}, {"every": 0}])
def test_refused(option: dict) -> None:
    with pytest.raises(
        ProxpoError, match=r"drop is a share|summary must not be negative|every must be 1 or more"
    ):
        method(SLUG, **option)


@pytest.mark.checks("foldact", "a cap below 1 + clip_high comes before the clip, for either sign")
def test_cap_below_the_clip() -> None:
    """ρ = min(r, cap), then max(-A ρ, -A clip(ρ, 0.8, 1.2)): nothing moves above the cap."""
    ratios = f64([0.7, 0.9, 1.04, 1.08, 1.15, 1.3])
    for sign in (1.0, -1.0):
        batch = crafted(
            ratios.log()[None].tolist(),
            [[sign] * 6],
            summary=[[False] * 6],
            segment_draw=f64([0.9]),
        )
        logp = batch.logp.clone().requires_grad_()
        loss = proxpo.loss_fn(method(SLUG, **PLAIN, cap=1.06))(batch.replace(logp=logp)).value
        r = (logp - batch.old_logp).exp().clamp(max=1.06)
        theirs = torch.max(-sign * r, -sign * r.clamp(0.8, 1.2)).mean()
        close(loss, theirs)
        close(*(torch.autograd.grad(x, logp)[0] for x in (loss, theirs)))
