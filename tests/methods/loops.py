"""Plain loops over rows and tokens, of which the references of all methods are made.

Written from the definitions in the papers, not from proxpo. A token is a pair (i, t). `logp` stays
a scalar of autograd, `number(...)` is the stop-gradient, everything else is a Python number.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from proxpo import Batch

Token = tuple[int, int]
Numbers = dict[Token, float]
Terms = dict[Token, Any]
Bounds = tuple[float, float]
Reference = Callable[[Batch], torch.Tensor]


def tokens(b: Batch) -> list[Token]:
    return [(i, t) for i, row in enumerate(b.mask.tolist()) for t, m in enumerate(row) if m]


def row(b: Batch, i: int) -> list[int]:
    return [t for t, m in enumerate(b.mask[i].tolist()) if m]


def groups(b: Batch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, g in enumerate(b.group.tolist()):
        found.setdefault(g, []).append(i)
    return found


def mean(xs: list[Any]) -> Any:
    return sum(xs) / max(len(xs), 1)


def std(xs: list[float], *, ddof: int = 1) -> float:
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - ddof))


def number(x: Any) -> float:
    """The stop-gradient: a plain number."""
    return float(x.detach()) if isinstance(x, torch.Tensor) else x


def larger(a: Any, b: Any) -> Any:
    return a if number(a) >= number(b) else b


def smaller(a: Any, b: Any) -> Any:
    return a if number(a) <= number(b) else b


def bounded(x: Any, low: float, high: float) -> Any:
    """clip(x, low, high); a constant outside the bounds, so its gradient is 0 there."""
    return low if number(x) < low else high if number(x) > high else x


def exp(x: Any) -> Any:
    return torch.exp(x) if isinstance(x, torch.Tensor) else math.exp(x)


# Averages -----------------------------------------------------------------------------------------


def token_mean(x: Terms, b: Batch) -> Any:
    return sum(x.values()) / len(x)


def row_sums(x: Terms, b: Batch) -> list[Any]:
    return [sum(x[i, t] for t in row(b, i)) for i in range(len(b.mask)) if row(b, i)]


def row_means(x: Terms, b: Batch) -> list[Any]:
    return [mean([x[i, t] for t in row(b, i)]) for i in range(len(b.mask)) if row(b, i)]


def seq_mean_token_sum(x: Terms, b: Batch) -> Any:
    return mean(row_sums(x, b))


def seq_mean_token_mean(x: Terms, b: Batch) -> Any:
    return mean(row_means(x, b))


def prompt_mean(x: Terms, b: Batch) -> Any:
    per_prompt = []
    for members in groups(b).values():
        inside = [x[i, t] for i in members for t in row(b, i)]
        if inside:
            per_prompt.append(mean(inside))
    return mean(per_prompt)


# Advantages ---------------------------------------------------------------------------------------


def everywhere(per_row: dict[int, float], b: Batch) -> Numbers:
    return {(i, t): per_row[i] for i, t in tokens(b)}


def z_scores(b: Batch, *, eps: float = 1e-6) -> Numbers:
    r, out = b.rewards.tolist(), {}
    for members in groups(b).values():
        inside = [r[i] for i in members]
        for i in members:
            out[i] = r[i] if len(inside) == 1 else (r[i] - mean(inside)) / (std(inside) + eps)
    return everywhere(out, b)


def centred(b: Batch) -> dict[int, float]:
    r = b.rewards.tolist()
    return {i: r[i] - mean([r[j] for j in g]) for g in groups(b).values() for i in g}


def others_mean(b: Batch) -> dict[int, float]:
    r = b.rewards.tolist()
    return {i: mean([r[j] for j in g if j != i]) for g in groups(b).values() for i in g}


def token_rewards(b: Batch, *, kl_coef: float = 0.0) -> Numbers:
    """The outcome on the last valid token, step rewards where they are, minus β(ℓ_old - ℓ_ref)."""
    out = {}
    for i, t in tokens(b):
        outcome = number(b.rewards[i]) if t == row(b, i)[-1] else 0.0
        out[i, t] = number(b.token_rewards[i, t]) + outcome
        if kl_coef:
            out[i, t] -= kl_coef * (number(b.old_logp[i, t]) - number(b.ref_logp[i, t]))
    return out


def returns(rho: Numbers, b: Batch, *, gamma: float = 1.0) -> Numbers:
    out: Numbers = {}
    for i in range(len(b.mask)):
        total = 0.0
        for t in reversed(row(b, i)):
            total = rho[i, t] + gamma * total
            out[i, t] = total
    return out


def gae(rho: Numbers, b: Batch, *, gamma: float, lam: float) -> Numbers:
    out: Numbers = {}
    for i in range(len(b.mask)):
        value_next = advantage_next = 0.0
        for t in reversed(row(b, i)):
            value = number(b.old_values[i, t])
            delta = rho[i, t] + gamma * value_next - value
            advantage_next = out[i, t] = delta + gamma * lam * advantage_next
            value_next = value
    return out


def whitened(a: Numbers, *, unbiased: bool = True) -> Numbers:
    mu, variance = mean(list(a.values())), std(list(a.values()), ddof=int(unbiased)) ** 2
    root = math.sqrt(variance + 1e-8) if unbiased else math.sqrt(max(variance, 1e-8))
    return {k: (v - mu) / root for k, v in a.items()}


def process_scores(b: Batch, *, eps: float = 1e-6) -> Numbers:
    score, out = {}, {}
    for members in groups(b).values():
        ends = [(i, t) for i in members for t in row(b, i) if b.step_end[i, t]]
        values = [number(b.token_rewards[end]) for end in ends]
        for end, value in zip(ends, values):
            spread = std(values) if len(values) > 1 else 0.0
            score[end] = (value - mean(values)) / (spread + eps)
    for i, t in tokens(b):
        out[i, t] = sum(score.get((i, s), 0.0) for s in row(b, i) if s >= t)
    return out


# Ratios -------------------------------------------------------------------------------------------


def log_ratio(b: Batch, anchor: Any = None) -> Terms:
    anchor = b.old_logp if anchor is None else anchor
    return {(i, t): b.logp[i, t] - number(anchor[i, t]) for i, t in tokens(b)}


def ratio(b: Batch, anchor: Any = None) -> Terms:
    return {k: exp(d) for k, d in log_ratio(b, anchor).items()}


def sequence_ratio(b: Batch, *, anchor: Any = None, normalise: bool = True) -> Terms:
    d, out = log_ratio(b, anchor), {}
    for i in range(len(b.mask)):
        ts = row(b, i)
        total = sum(d[i, t] for t in ts)
        for t in ts:
            out[i, t] = exp(total / len(ts) if normalise else total)
    return out


def kalman_gains(n: int, *, q: float, v: float, p0: float) -> list[float]:
    gains, p = [], p0
    for _ in range(n):
        prior = p + q
        gains.append(prior / (prior + v))
        p = (1 - gains[-1]) * prior
    return gains


def filtered_ratio(b: Batch, gains: list[float], *, skip: bool) -> Terms:
    """r̂ with the token's own gradient. A hole counts as z = 0, or is passed over with skip."""
    out: Terms = {}
    for i in range(len(b.mask)):
        x, step = 0.0, 0
        for t in range(b.mask.shape[1]):
            valid = bool(b.mask[i, t])
            if skip and not valid:
                continue
            z = number(b.logp[i, t]) - number(b.old_logp[i, t]) if valid else 0.0
            x = (1 - gains[step]) * x + gains[step] * z
            step += 1
            if valid:
                out[i, t] = exp(b.logp[i, t] - number(b.logp[i, t]) + x)
    return out


# Token losses -------------------------------------------------------------------------------------


def clipped_between(
    r: Terms, a: Numbers, bounds: Callable[[Token], Bounds], *, dual: float = math.inf
) -> Terms:
    """max(-A r, -A clip(r, lo, hi)), bounds by token; at most dual·|A| where A < 0."""
    out = {}
    for k in r:
        x = larger(-a[k] * r[k], -a[k] * bounded(r[k], *bounds(k)))
        out[k] = smaller(x, -a[k] * dual) if a[k] < 0 else x
    return out


def clipped(r: Terms, a: Numbers, low: float, high: float, *, dual: float = math.inf) -> Terms:
    """PPO's: between 1-low and 1+high."""
    return clipped_between(r, a, lambda _: (1 - low, 1 + high), dual=dual)


def weighted_score(w: Numbers, a: Numbers, b: Batch) -> Terms:
    return {(i, t): -w[i, t] * a[i, t] * b.logp[i, t] for i, t in tokens(b)}


def k3(b: Batch, other: Any) -> Terms:
    out = {}
    for i, t in tokens(b):
        d = b.logp[i, t] - number(other[i, t])
        out[i, t] = exp(-d) - 1 + d
    return out


def plus(x: Terms, *more: tuple[float, Terms]) -> Terms:
    return {k: x[k] + sum(c * y[k] for c, y in more) for k in x}


def times(x: Terms, w: Numbers) -> Terms:
    return {k: w[k] * x[k] for k in x}


def entropies(b: Batch) -> Terms:
    return {(i, t): b.entropy[i, t] for i, t in tokens(b)}


def kept(b: Batch, keep: Callable[[int, int], bool]) -> Batch:
    """The batch with a smaller mask."""
    mask = b.mask.clone()
    for i, t in tokens(b):
        mask[i, t] = keep(i, t)
    return b.replace(mask=mask)


def informative(b: Batch) -> set[int]:
    rows = set()
    for members in groups(b).values():
        right = sum(bool(b.correct[i]) for i in members)
        if 0 < right < len(members) or len(members) == 1:
            rows |= set(members)
    return rows


# Terms that several methods share --------------------------------------------------------------


def score(a: Numbers, b: Batch) -> Terms:
    return weighted_score(dict.fromkeys(a, 1.0), a, b)


def unclipped(r: Terms, a: Numbers) -> Terms:
    return {k: -a[k] * r[k] for k in r}


def value_terms(b: Batch, raw: Numbers, *, clip: float = math.inf) -> Terms:
    out = {}
    for (i, t), a in raw.items():
        old, v = number(b.old_values[i, t]), b.values[i, t]
        target = a + old
        held = bounded(v, old - clip, old + clip)
        out[i, t] = larger((v - target) ** 2, (held - target) ** 2) / 2
    return out


def full_kl(b: Batch, kind: str) -> Terms:
    out = {}
    for i, t in tokens(b):
        terms = []
        for a in range(b.vocab_logp.shape[-1]):
            new, old = b.vocab_logp[i, t, a], number(b.old_vocab_logp[i, t, a])
            terms.append(
                math.exp(old) * (old - new) if kind == "beta_pi" else exp(new) * (new - old)
            )
        out[i, t] = sum(terms) / (len(terms) if kind == "pi_beta_mean" else 1)
    return out


def grpo_terms(b: Batch, *, cap: float = math.inf, dual: float = math.inf) -> Terms:
    r = {k: smaller(v, cap) for k, v in ratio(b).items()}
    return clipped(r, z_scores(b), 0.2, 0.2, dual=dual)


def covariances(b: Batch, a: Numbers) -> Numbers:
    """(A - mean A)(log π - mean log π) of each token."""
    logp = {(i, t): number(b.logp[i, t]) for i, t in tokens(b)}
    a_mean, l_mean = mean(list(a.values())), mean(list(logp.values()))
    return {k: (a[k] - a_mean) * (logp[k] - l_mean) for k in a}


def sample_size(r: Terms) -> float:
    """(Σ r)²/(Σ r² + 1e-8)/n."""
    values = [number(v) for v in r.values()]
    return sum(values) ** 2 / (sum(v**2 for v in values) + 1e-8) / len(values)


def filtered_loss(
    b: Batch, gains: list[float], *, skip: bool = False, clip: float | None = 0.02
) -> Any:
    """KPO's loss with these gains."""
    r, a = filtered_ratio(b, gains, skip=skip), z_scores(b)
    return seq_mean_token_mean(unclipped(r, a) if clip is None else clipped(r, a, clip, clip), b)


def gains_of(b: Batch, *, q: float, p0: float) -> list[float]:
    return kalman_gains(b.mask.shape[1], q=q, v=1.0, p0=p0)
