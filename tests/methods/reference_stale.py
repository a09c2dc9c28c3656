"""Plain loops for the methods that correct for data of an older policy."""

import math
from typing import Any

import torch

from methods.loops import (
    Numbers,
    Reference,
    Terms,
    clipped,
    entropies,
    filtered_ratio,
    full_kl,
    gae,
    grpo_terms,
    k3,
    kalman_gains,
    kept,
    mean,
    number,
    plus,
    ratio,
    row,
    score,
    seq_mean_token_mean,
    times,
    token_mean,
    token_rewards,
    tokens,
    unclipped,
    value_terms,
    weighted_score,
    z_scores,
)
from proxpo import Batch


def sampler_weights(b: Batch, *, sequence: bool = False) -> Numbers:
    q = {(i, t): number(b.old_logp[i, t]) - number(b.rollout_logp[i, t]) for i, t in tokens(b)}
    if sequence:
        q = {(i, t): sum(q[i, s] for s in row(b, i)) for i, t in q}
    return {k: math.exp(v) for k, v in q.items()}


def tis(b: Batch, *, floor: float = 0.0, cap: float = 1.2, mask: bool = False) -> Numbers:
    w = sampler_weights(b)
    if mask:
        return {k: v if floor <= v <= cap else 0.0 for k, v in w.items()}
    return {k: min(max(v, floor), cap) for k, v in w.items()}


def tis_loss(w: Numbers, b: Batch) -> torch.Tensor:
    return seq_mean_token_mean(times(grpo_terms(b), w), b)


def tis_normalised(b: Batch) -> torch.Tensor:
    w = tis(b)
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


def proximal(b: Batch, kind: str) -> Any:
    out = b.prox_logp.clone()
    for i, t in tokens(b):
        d, pb, p = int(b.lag[i, t]), number(b.old_logp[i, t]), number(b.logp[i, t])
        if kind == "linear":
            share = (d - 1) / d if d else 0.0
            out[i, t] = math.log((1 - share) * math.exp(pb) + share * math.exp(p) + 1e-10)
        elif kind != "recompute":
            alpha = 1 / d if d else (0.0 if kind == "a3po" else 1.0)
            out[i, t] = alpha * pb + (1 - alpha) * p
    return out


def decoupled(
    b: Batch, kind: str = "recompute", *, cap: float = math.inf, dual: float = math.inf
) -> torch.Tensor:
    prox = proximal(b, kind)
    v = {(i, t): math.exp(number(prox[i, t]) - number(b.old_logp[i, t])) for i, t in tokens(b)}
    v = {k: min(x, cap) for k, x in v.items()}
    return token_mean(times(clipped(ratio(b, prox), z_scores(b), 0.2, 0.2, dual=dual), v), b)


def decoupled_masked(b: Batch) -> torch.Tensor:
    a, v = z_scores(b), {}
    b = kept(b, lambda i, t: max(int(b.lag[i, s]) for s in row(b, i)) <= 3)
    for i, t in tokens(b):
        g = mean([number(b.prox_logp[i, s]) - number(b.old_logp[i, s]) for s in row(b, i)])
        v[i, t] = math.exp(g) if math.exp(g) <= 1.02 else 0.0
    return token_mean(times(clipped(ratio(b, b.prox_logp), a, 0.2, 0.2), v), b)


def ess(r: Terms) -> float:
    values = [number(v) for v in r.values()]
    return sum(values) ** 2 / (sum(v**2 for v in values) + 1e-8) / len(values)


def p3o(b: Batch, *, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> torch.Tensor:
    r, a = ratio(b), z_scores(b, eps=1e-8)
    e = ess(r)
    x = weighted_score({k: min(number(v), e) for k, v in r.items()}, a, b)
    kl = k3(b, b.old_logp)
    x = plus(x, (1 - e, kl), (kl_coef, k3(b, b.ref_logp)), (-entropy_coef, entropies(b)))
    return token_mean(x, b)


def p4o(b: Batch) -> torch.Tensor:
    r_b, r_p, a = ratio(b), ratio(b, b.prox_logp), z_scores(b, eps=1e-8)
    e_b, e_p = ess(r_b), ess(r_p)
    e, w_b, w_p = min(e_b, e_p), 1 - e_b, 1 - e_p
    x = weighted_score({k: min(number(v), e) for k, v in r_b.items()}, a, b)
    mix = b.old_logp.clone()
    for i, t in tokens(b):
        both = w_b * math.exp(b.old_logp[i, t]) + w_p * math.exp(b.prox_logp[i, t])
        mix[i, t] = math.log(both / (w_b + w_p))
    return token_mean(plus(x, (1 - e, k3(b, mix))), b)


def p3o_2019(b: Batch, *, kl: str, cap: bool = True) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=0.99, lam=0.95)
    w = {(i, t): math.exp(number(b.logp[i, t])) / (math.exp(number(b.old_logp[i, t])) + 1e-7)
         for i, t in tokens(b)}  # fmt: skip
    total, squares = sum(w.values()), sum(v**2 for v in w.values())
    size = (total**2 / squares + 1e-7) / len(w)
    x = weighted_score({k: min(v, size if cap else 1.0) for k, v in w.items()}, raw, b)
    pull = k3(b, b.old_logp) if kl == "sampled" else full_kl(b, kl)
    return token_mean(plus(x, (1 - size, pull), (1.0, value_terms(b, raw))), b)


def p3o_2019_on(b: Batch) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=0.99, lam=0.95)
    x = plus(score(raw, b), (-0.01, entropies(b)), (1.0, value_terms(b, raw)))
    return token_mean(x, b)


def kpo(b: Batch, gains: list[float], *, skip: bool = False, clip: float | None = 0.02) -> Any:
    r, a = filtered_ratio(b, gains, skip=skip), z_scores(b)
    return seq_mean_token_mean(unclipped(r, a) if clip is None else clipped(r, a, clip, clip), b)


def gains(b: Batch, *, q: float, p0: float) -> list[float]:
    return kalman_gains(b.mask.shape[1], q=q, v=1.0, p0=p0)


STALE: dict[str, Reference] = {
    "tis": lambda b: tis_loss(tis(b), b),
    "tis-icepop": lambda b: tis_loss(tis(b, floor=0.9, cap=1.3, mask=True), b),
    "tis-sequence": tis_sequence,
    "tis-normalised": tis_normalised,
    "tis-bypass": lambda b: seq_mean_token_mean(
        clipped(ratio(b, b.rollout_logp), z_scores(b), 0.2, 0.2), b
    ),
    "tis-reject": tis_reject,
    "decoupled-ppo": decoupled,
    "decoupled-masked": decoupled_masked,
    "a3po": lambda b: decoupled(b, "a3po", cap=1.2),
    "a3po-areal": lambda b: decoupled(b, "areal"),
    "a3po-linear": lambda b: decoupled(b, "linear", dual=1.5),
    "p3o": p3o,
    "p3o-terms": lambda b: p3o(b, kl_coef=0.1, entropy_coef=0.01),
    "p3o-2019": lambda b: p3o_2019(b, kl="sampled"),
    "p3o-2019-on": p3o_2019_on,
    "p3o-2019-full": lambda b: p3o_2019(b, kl="beta_pi", cap=False),
    "p3o-2019-code": lambda b: p3o_2019(b, kl="pi_beta_mean"),
    "p4o": p4o,
    "kpo": lambda b: kpo(b, gains(b, q=0.1, p0=0.0)),
    "kpo-skip": lambda b: kpo(b, gains(b, q=0.1, p0=0.0), skip=True, clip=None),
    "ema-kpo": lambda b: kpo(b, gains(b, q=0.01, p0=1.0)),
    "ema-kpo-fixed": lambda b: seq_mean_token_mean(
        clipped(filtered_ratio(b, [0.3] * b.mask.shape[1], skip=True), z_scores(b), 3e-4, 4e-4),
        b,
    ),
}
