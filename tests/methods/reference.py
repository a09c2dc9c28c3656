"""Every method once more as plain loops over rows and tokens: obviously right, but slow.

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


def clipped(
    r: Terms, a: Numbers, low: float, high: float, *, dual: float = math.inf, cap: float = math.inf
) -> Terms:
    """max(-A min(r, cap), -A clip(r, 1-low, 1+high)); at most dual·|A| where A < 0."""
    out = {}
    for k in r:
        x = larger(-a[k] * smaller(r[k], cap), -a[k] * bounded(r[k], 1 - low, 1 + high))
        out[k] = smaller(x, -a[k] * dual) if a[k] < 0 else x
    return out


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


# Methods ------------------------------------------------------------------------------------------


def reinforce(b: Batch, *, baseline: str = "group", gamma: float = 1.0) -> Numbers:
    b0 = b
    total = returns(token_rewards(b0), b0, gamma=gamma)
    r = b.rewards.tolist()
    base = {
        "batch": lambda: dict.fromkeys(range(len(r)), mean(r)),
        "group": lambda: {i: r[i] - c for i, c in centred(b).items()},
        "leave_one_out": lambda: others_mean(b),
    }[baseline]()
    return {(i, t): total[i, t] - base[i] for i, t in tokens(b)}


def score(a: Numbers, b: Batch) -> Terms:
    return weighted_score(dict.fromkeys(a, 1.0), a, b)


def truncated_reinforce(b: Batch, cap: float, *, sequence: bool) -> torch.Tensor:
    r = sequence_ratio(b, anchor=b.rollout_logp, normalise=False) if sequence else None
    r = ratio(b, b.rollout_logp) if r is None else r
    w = {k: min(number(v), cap) for k, v in r.items()}
    return seq_mean_token_sum(weighted_score(w, reinforce(b), b), b)


def unclipped(r: Terms, a: Numbers) -> Terms:
    return {k: -a[k] * r[k] for k in r}


def rloo_advantages(
    b: Batch, *, kl_coef: float, low: float = -math.inf, high: float = math.inf
) -> dict[int, float]:
    shaped = []
    for i in range(len(b.mask)):
        kl = sum(number(b.old_logp[i, t]) - number(b.ref_logp[i, t]) for t in row(b, i))
        shaped.append(min(max(number(b.rewards[i]), low), high) - kl_coef * kl)
    c = b.replace(rewards=torch.tensor(shaped, dtype=torch.float64))
    return {i: shaped[i] - base for i, base in others_mean(c).items()}


def rloo_paper(b: Batch) -> torch.Tensor:
    return seq_mean_token_sum(score(everywhere(rloo_advantages(b, kl_coef=0.05), b), b), b)


def rloo_trl(b: Batch) -> torch.Tensor:
    a = rloo_advantages(b, kl_coef=0.05, low=0.1, high=0.8)
    scale = std(list(a.values())) + 1e-4
    a = {i: (x - mean(list(a.values()))) / scale for i, x in a.items()}
    rho = sequence_ratio(b, normalise=False)
    return seq_mean_token_mean(clipped(rho, everywhere(a, b), 0.2, 0.2), b)


def reinforce_pp(
    b: Batch, *, kl_coef: float, gamma: float = 1.0, unbiased: bool = True
) -> torch.Tensor:
    a = returns(token_rewards(b, kl_coef=kl_coef), b, gamma=gamma)
    return token_mean(clipped(ratio(b), whitened(a, unbiased=unbiased), 0.2, 0.2), b)


def reinforce_pp_baseline(b: Batch) -> torch.Tensor:
    a = returns(token_rewards(b), b)
    r = b.rewards.tolist()
    base = {i: r[i] - c for i, c in centred(b).items()}
    a = whitened({(i, t): a[i, t] - base[i] for i, t in tokens(b)})
    k2 = {k: d**2 / 2 for k, d in log_ratio(b, b.ref_logp).items()}
    return token_mean(plus(clipped(ratio(b), a, 0.2, 0.2), (0.01, k2)), b)


def remax(b: Batch) -> torch.Tensor:
    a = returns(token_rewards(b, kl_coef=0.1), b)
    a = {(i, t): v - number(b.greedy_rewards[i]) for (i, t), v in a.items()}
    return token_mean(score(a, b), b)


def remax_official(b: Batch) -> torch.Tensor:
    a = {}
    for i, t in tokens(b):
        ts = row(b, i)
        gain = bounded(number(b.rewards[i]) - number(b.greedy_rewards[i]), -0.6, 0.6)
        kl = number(b.old_logp[i, t]) - number(b.ref_logp[i, t])
        a[i, t] = 0.99 ** (len(ts) - ts.index(t)) * gain - 0.05 * kl
    return token_mean(score(a, b), b)


def opo_advantages(b: Batch) -> Numbers:
    r, out = b.rewards.tolist(), {}
    for members in groups(b).values():
        length = {i: len(row(b, i)) for i in members}
        base = sum(length[i] * r[i] for i in members) / sum(length.values())
        out |= {i: r[i] - base for i in members}
    return everywhere(out, b)


def value_terms(b: Batch, raw: Numbers, *, clip: float = math.inf) -> Terms:
    out = {}
    for (i, t), a in raw.items():
        old, v = number(b.old_values[i, t]), b.values[i, t]
        target = a + old
        held = bounded(v, old - clip, old + clip)
        out[i, t] = larger((v - target) ** 2, (held - target) ** 2) / 2
    return out


def ppo(
    b: Batch,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl_coef: float = 0.0,
    whiten: bool = True,
    value_clip: float = 0.5,
    value_coef: float = 1.0,
    entropy_coef: float = 0.0,
    dual: float = math.inf,
) -> torch.Tensor:
    raw = gae(token_rewards(b, kl_coef=kl_coef), b, gamma=gamma, lam=lam)
    x = clipped(ratio(b), whitened(raw) if whiten else raw, 0.2, 0.2, dual=dual)
    x = plus(x, (-entropy_coef, entropies(b)), (value_coef, value_terms(b, raw, clip=value_clip)))
    return token_mean(x, b)


def grpo_terms(b: Batch, **bounds: float) -> Terms:
    return clipped(ratio(b), z_scores(b), 0.2, 0.2, **bounds)


def grpo_batch(b: Batch) -> torch.Tensor:
    a = {i: x / (std(b.rewards.tolist()) + 1e-4) for i, x in centred(b).items()}
    return seq_mean_token_mean(clipped(ratio(b), everywhere(a, b), 0.2, 0.2), b)


def grpo_kl(b: Batch, *, corrected: bool) -> torch.Tensor:
    r = ratio(b)
    penalty = {k: (r[k] if corrected else 1.0) * v for k, v in k3(b, b.ref_logp).items()}
    return seq_mean_token_mean(plus(grpo_terms(b), (0.04, penalty)), b)


def grpo_stale_mask(b: Batch) -> torch.Tensor:
    x, a = grpo_terms(b), z_scores(b)
    for i in range(len(b.mask)):
        drift = [number(b.rollout_logp[i, t]) - number(b.logp[i, t]) for t in row(b, i)]
        for t in row(b, i):
            if a[i, t] < 0 and mean(drift) > 0.05:
                x[i, t] = 0.0 * x[i, t]
    return seq_mean_token_mean(x, b)


def dr_grpo(b: Batch, *, length: float, drop_truncated: bool = False) -> torch.Tensor:
    x = clipped(ratio(b), everywhere(centred(b), b), 0.2, 0.2)
    total = sum(v for (i, _), v in x.items() if not (drop_truncated and b.truncated[i]))
    return total / length / len(b.mask)


def overlong(b: Batch, *, most: float, cache: float, floor: bool) -> Batch:
    shaped = []
    for i in range(len(b.mask)):
        n = len(row(b, i))
        penalty = 0.0 if n <= most - cache else ((most - cache) - n) / cache
        shaped.append(number(b.rewards[i]) + (max(penalty, -1.0) if floor else penalty))
    return b.replace(rewards=torch.tensor(shaped, dtype=torch.float64))


def dapo(b: Batch) -> torch.Tensor:
    a = z_scores(overlong(b, most=5, cache=4, floor=True))
    return token_mean(clipped(ratio(b), a, 0.2, 0.28), b)


def dapo_prompt(b: Batch) -> torch.Tensor:
    a = z_scores(overlong(b, most=5, cache=4, floor=False))
    rows = informative(b)
    b = kept(b, lambda i, t: i in rows and not b.truncated[i])
    return prompt_mean(clipped(ratio(b), a, 0.2, 0.28, dual=1.4), b)


def gspo(b: Batch, average: Callable[[Terms, Batch], Any]) -> torch.Tensor:
    return average(clipped(sequence_ratio(b), z_scores(b), 0.03, 0.04), b)


def gspo_token(b: Batch) -> torch.Tensor:
    s = {
        (i, t): number(v) * exp(b.logp[i, t] - number(b.logp[i, t]))
        for (i, t), v in sequence_ratio(b).items()
    }
    return seq_mean_token_mean(clipped(s, z_scores(b), 0.03, 0.04), b)


def cispo(b: Batch, low: float, high: float) -> Terms:
    w = {k: bounded(number(v), low, high) for k, v in ratio(b).items()}
    return weighted_score(w, z_scores(b), b)


def cispo_unified(b: Batch) -> torch.Tensor:
    x, a, r = cispo(b, 0.9, 1.2), z_scores(b), ratio(b)
    silent = {k: (a[k] > 0 and r[k] > 1.1) or (a[k] < 0 and r[k] < 0.8) for k in x}
    return token_mean({k: 0.0 * x[k] if silent[k] else x[k] for k in x}, b)


def scalerl(b: Batch) -> torch.Tensor:
    c = centred(b)
    a = {i: x / (std(list(c.values())) + 1e-6) for i, x in c.items()}
    rows = informative(b)
    b = kept(b, lambda i, t: i in rows)
    w = {k: min(number(v), 1.2) for k, v in ratio(b, b.rollout_logp).items()}
    return prompt_mean(weighted_score(w, everywhere(a, b), b), b)


def sapo(b: Batch, r: Terms, tau_pos: float, tau_neg: float) -> torch.Tensor:
    a, x = z_scores(b), {}
    for k in r:
        tau = tau_pos if a[k] > 0 else tau_neg
        x[k] = -4 / tau / (1 + exp(-tau * (r[k] - 1))) * a[k]
    return seq_mean_token_mean(x, b)


def gmpo(
    b: Batch, clip: Callable[[Any, float], Any], *, per: str, kl_coef: float = 0.0
) -> torch.Tensor:
    d, a, kl, terms = log_ratio(b), z_scores(b), k3(b, b.ref_logp), []
    for i in range(len(b.mask)):
        ts = row(b, i)
        if not ts:
            continue
        parts = [clip(d[i, t], a[i, t]) if per == "token" else d[i, t] for t in ts]
        total = clip(sum(parts), a[i, ts[0]]) if per == "sequence" else sum(parts)
        g = exp(total if per == "product" else total / len(ts))
        terms.append(-a[i, ts[0]] * g + kl_coef * mean([kl[i, t] for t in ts]))
    return mean(terms)


def one_sided(low: float, high: float) -> Callable[[Any, float], Any]:
    return lambda d, a: smaller(d, high) if a >= 0 else larger(d, -low)


def covariances(b: Batch, a: Numbers) -> Numbers:
    logp = {(i, t): number(b.logp[i, t]) for i, t in tokens(b)}
    a_mean, l_mean = mean(list(a.values())), mean(list(logp.values()))
    return {k: (a[k] - a_mean) * (logp[k] - l_mean) for k in a}


def clip_cov(b: Batch) -> torch.Tensor:
    """With so large a share that every eligible token is taken."""
    a, r = z_scores(b), ratio(b)
    x, cov = clipped(r, a, 1.0, 0.2), covariances(b, a)
    for k in x:
        outside = (a[k] > 0 and r[k] > 1.2) or (a[k] < 0 and r[k] < 0.0)
        if not outside and 0.1 < cov[k] < 5:
            x[k] = 0.0 * x[k]
    return token_mean(x, b)


def kl_cov(b: Batch) -> torch.Tensor:
    a = z_scores(b)
    cov, d = covariances(b, a), log_ratio(b)
    chosen = sorted(cov, key=cov.get, reverse=True)[: max(1, math.floor(0.2 * len(cov)))]
    x = unclipped(ratio(b), a)
    return token_mean({k: x[k] + (abs(d[k]) if k in chosen else 0.0) for k in x}, b)


def entropy_top(b: Batch) -> torch.Tensor:
    x = clipped(ratio(b), z_scores(b), 0.2, 0.28)
    h = {(i, t): number(b.entropy[i, t]) for i, t in tokens(b)}
    chosen = sorted(h, key=h.get, reverse=True)[: max(1, math.ceil(0.2 * len(h) - 1e-9))]
    return mean([x[k] for k in chosen])


def entropy_quantile(b: Batch) -> torch.Tensor:
    x = clipped(ratio(b), z_scores(b), 0.2, 0.28)
    h = {(i, t): number(b.entropy[i, t]) for i, t in tokens(b)}
    bound = torch.quantile(torch.tensor(list(h.values()), dtype=torch.float64), 0.8)
    return sum(x[k] for k in x if h[k] >= bound) / len(x)


def lopti(b: Batch, *, alpha: float, kl_coef: float) -> torch.Tensor:
    a = {(i, t): (alpha * math.exp(b.old_logp[i, t]) + 1 - alpha) * v
         for (i, t), v in z_scores(b).items()}  # fmt: skip
    x = clipped(ratio(b), a, 0.2, 0.24, dual=10.0)
    return token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


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


def pair_margins(b: Batch, *, averaged: bool = False) -> list[Any]:
    out = []
    for members in groups(b).values():
        best = max(members, key=lambda i: (number(b.rewards[i]), -i))
        worst = min(members, key=lambda i: (number(b.rewards[i]), i))
        if b.rewards[best] > b.rewards[worst]:
            h = [sum(b.logp[i, t] - number(b.ref_logp[i, t]) for t in row(b, i))
                 / (len(row(b, i)) if averaged else 1) for i in (best, worst)]  # fmt: skip
            out.append(h[0] - h[1])
    return out


def dpo(b: Batch, *, smoothing: float = 0.0, robust: bool = False) -> torch.Tensor:
    terms = []
    for h in pair_margins(b):
        agree, oppose = torch.log(1 + exp(-0.1 * h)), torch.log(1 + exp(0.1 * h))
        if robust:
            x = ((1 - smoothing) * agree - smoothing * oppose) / (1 - 2 * smoothing)
        else:
            x = (1 - smoothing) * agree + smoothing * oppose
        terms.append(x)
    return mean(terms)


def ipo(b: Batch, *, averaged: bool) -> torch.Tensor:
    return mean([(h - 1 / (2 * 0.1)) ** 2 for h in pair_margins(b, averaged=averaged)])


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


def p3o_2019_on(b: Batch) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=0.99, lam=0.95)
    x = plus(score(raw, b), (-0.01, entropies(b)), (1.0, value_terms(b, raw)))
    return token_mean(x, b)


def kpo(b: Batch, gains: list[float], *, skip: bool = False, clip: float | None = 0.02) -> Any:
    r, a = filtered_ratio(b, gains, skip=skip), z_scores(b)
    return seq_mean_token_mean(unclipped(r, a) if clip is None else clipped(r, a, clip, clip), b)


def gains(b: Batch, *, q: float, p0: float) -> list[float]:
    return kalman_gains(b.mask.shape[1], q=q, v=1.0, p0=p0)


REFERENCES: dict[str, Reference] = {
    "reinforce": lambda b: seq_mean_token_sum(score(reinforce(b), b), b),
    "reinforce-ratio": lambda b: seq_mean_token_sum(unclipped(ratio(b), reinforce(b)), b),
    "reinforce-truncated": lambda b: truncated_reinforce(b, 1.1, sequence=False),
    "reinforce-truncated-seq": lambda b: truncated_reinforce(b, 1.3, sequence=True),
    "reinforce-discounted": lambda b: seq_mean_token_sum(
        score(reinforce(b, gamma=0.9, baseline="leave_one_out"), b), b
    ),
    "reinforce-batch-baseline": lambda b: seq_mean_token_sum(
        score(reinforce(b, baseline="batch"), b), b
    ),
    "reinforce-standardised": lambda b: seq_mean_token_sum(score(z_scores(b), b), b),
    "rloo": rloo_paper,
    "rloo-trl": rloo_trl,
    "reinforce-pp": lambda b: reinforce_pp(b, kl_coef=0.01),
    "reinforce-pp-population": lambda b: reinforce_pp(b, kl_coef=0.2, gamma=0.9, unbiased=False),
    "reinforce-pp-baseline": reinforce_pp_baseline,
    "remax": remax,
    "remax-official": remax_official,
    "opo": lambda b: token_mean(clipped(ratio(b), opo_advantages(b), 0.2, 0.2), b),
    "ppo": ppo,
    "ppo-full": lambda b: ppo(
        b,
        gamma=0.95,
        lam=0.9,
        kl_coef=0.1,
        value_clip=0.2,
        value_coef=0.1,
        entropy_coef=0.01,
        dual=1.5,
    ),
    "ppo-raw": lambda b: ppo(b, whiten=False, value_clip=math.inf),
    "grpo": lambda b: seq_mean_token_mean(grpo_terms(b), b),
    "grpo-kl": lambda b: grpo_kl(b, corrected=False),
    "grpo-kl-corrected": lambda b: grpo_kl(b, corrected=True),
    "grpo-batch": grpo_batch,
    "grpo-process": lambda b: seq_mean_token_mean(
        clipped(ratio(b), process_scores(b), 0.2, 0.2), b
    ),
    "grpo-capped": lambda b: seq_mean_token_mean(grpo_terms(b, cap=1.3, dual=1.25), b),
    "grpo-stale-mask": grpo_stale_mask,
    "dr-grpo": lambda b: dr_grpo(b, length=3000),
    "dr-grpo-truncated": lambda b: dr_grpo(b, length=9, drop_truncated=True),
    "dapo": dapo,
    "dapo-prompt": dapo_prompt,
    "gspo": lambda b: gspo(b, seq_mean_token_mean),
    "gspo-token": gspo_token,
    "gspo-luspo": lambda b: gspo(b, seq_mean_token_sum),
    "cispo": lambda b: token_mean(cispo(b, 0.0, 1.2), b),
    "cispo-trl": lambda b: token_mean(cispo(b, 0.0, 1.1), b),
    "cispo-unified": cispo_unified,
    "scalerl": scalerl,
    "sapo": lambda b: sapo(b, ratio(b), 1.0, 1.05),
    "sapo-sequence": lambda b: sapo(b, sequence_ratio(b), 2.0, 1.05),
    "gmpo": lambda b: gmpo(b, one_sided(0.2, 0.1), per="token"),
    "gmpo-sequence": lambda b: gmpo(b, one_sided(0.4, 0.3), per="sequence", kl_coef=0.1),
    "gmpo-product": lambda b: gmpo(b, one_sided(0.4, 0.4), per="product"),
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
    "entropy-80-20": entropy_top,
    "entropy-80-20-trl": entropy_quantile,
    "lopti": lambda b: lopti(b, alpha=0.3, kl_coef=0.001),
    "lopti-ar": lambda b: lopti(b, alpha=0.3, kl_coef=0.0),
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
    "dpo": dpo,
    "dpo-smooth": lambda b: dpo(b, smoothing=0.2),
    "dpo-robust": lambda b: dpo(b, smoothing=0.2, robust=True),
    "dpo-ipo": lambda b: ipo(b, averaged=True),
    "dpo-ipo-sum": lambda b: ipo(b, averaged=False),
    "isopo": lambda b: sum(score(z_scores(b), b).values()),
    "isopo-ntk": lambda b: sum(score(z_scores(b), b).values()),
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

from methods.reference_fields import FIELDS  # noqa: E402 - built from the loops above
from methods.reference_schedules import SCHEDULES  # noqa: E402
from methods.reference_tokens import TOKENS  # noqa: E402
from methods.reference_trust import TRUST  # noqa: E402

REFERENCES |= FIELDS | TOKENS | TRUST | SCHEDULES
