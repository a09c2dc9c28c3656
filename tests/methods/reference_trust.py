"""Plain loops for the methods that move ratios and trust regions."""

import math
from collections.abc import Callable
from typing import Any

import torch

from methods.loops import (
    Bounds,
    Numbers,
    Reference,
    Terms,
    bounded,
    clipped_between,
    everywhere,
    exp,
    full_kl,
    gae,
    groups,
    k3,
    larger,
    log_ratio,
    mean,
    number,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_ratio,
    smaller,
    std,
    times,
    token_mean,
    token_rewards,
    tokens,
    unclipped,
    value_terms,
    weighted_score,
    whitened,
    z_scores,
)
from proxpo import Batch

# DCPO ---------------------------------------------------------------------------------------------


def first_visit(b: Batch) -> Numbers:
    r, out = b.rewards.tolist(), {}
    for members in groups(b).values():
        inside = [r[i] for i in members]
        spread = std(inside) if len(inside) > 1 else 0.0
        for i in members:
            out[i] = (r[i] - mean(inside)) / spread if max(inside) > min(inside) else 0.0
    return everywhere(out, b)


def dcpo_terms(b: Batch, low: float, high: float, *, dual: float) -> Terms:
    def bounds(k: Any) -> Bounds:
        q = math.exp(number(b.old_logp[k]))
        lo = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / q, 0.0))
        return lo, min(0.5 + 0.5 * math.sqrt(1 + 4 * high / q), 10.0)

    return clipped_between(ratio(b), first_visit(b), bounds, dual=dual)


def dcpo(b: Batch) -> torch.Tensor:
    x = dcpo_terms(b, 0.16, 0.2, dual=10.0)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    return sum(mean([x[i, t] for t in row(b, i)]) for i in rows)


# BAPO ---------------------------------------------------------------------------------------------


def positive_and_negative(b: Batch, a: Numbers, low: float, high: float) -> tuple[float, float]:
    r = ratio(b)
    p = sum(min(number(r[k]), high) * a[k] for k in r if a[k] > 0)
    n = sum(max(number(r[k]), low) * -a[k] for k in r if a[k] < 0)
    return p, n


def searched_official(b: Batch, a: Numbers, target: float) -> Bounds:
    low, high = 0.6, 1.2

    def met() -> bool:
        p, n = positive_and_negative(b, a, low, high)
        return n <= 0 or p / (n + 1e-8) >= target

    while not met() and low < 0.8 - 1e-9:
        low = min(low + 0.05, 0.8)
    while not met() and high < 2.0 - 1e-9:
        high = min(high + 0.05, 2.0)
    return low, high


def share_paper(b: Batch, a: Numbers, low: float, high: float) -> float:
    r, above, total = ratio(b), 0.0, 0.0
    for k in r:
        v = number(r[k])
        s = math.exp(number(b.rollout_logp[k])) * abs(min(v * a[k], bounded(v, low, high) * a[k]))
        above, total = above + (s if a[k] > 0 else 0.0), total + s
    return above / total if total > above else 1.0


def share_gradient(b: Batch, a: Numbers, low: float, high: float) -> float:
    r, above, below = ratio(b), 0.0, 0.0
    for k in r:
        v = number(r[k])
        if a[k] > 0 and v < high:
            above += v * a[k]
        if a[k] < 0 and v > low:
            below += v * -a[k]
    return above / (above + below) if below else 1.0


def searched_paper(
    b: Batch, a: Numbers, share: Callable[..., float], target: float, start: Bounds, end: Bounds
) -> Bounds:
    (low, high), tiny = start, 1e-9
    while share(b, a, low, high) < target and low + 0.05 <= end[0] + tiny:
        if high + 0.1 <= end[1] + tiny:
            high += 0.1
        else:
            low += 0.05
    return low, high


def bapo(b: Batch, search: Callable[[Batch, Numbers], Bounds], *, dual: float = math.inf) -> Any:
    a = z_scores(b)
    bounds = search(b, a)
    return token_mean(clipped_between(ratio(b), a, lambda k: bounds, dual=dual), b)


# ASPO ---------------------------------------------------------------------------------------------


def certain(b: Batch) -> set[Any]:
    """Tokens at or below the 80 % quantile of their response's entropies."""
    found = set()
    for i in range(len(b.mask)):
        ts = row(b, i)
        h = sorted(number(b.entropy[i, t]) for t in ts)
        place = 0.8 * (len(h) - 1)
        for t in ts:
            low = math.floor(place)
            high = min(low + 1, len(h) - 1)
            if number(b.entropy[i, t]) <= h[low] + (place - low) * (h[high] - h[low]):
                found.add((i, t))
    return found


def aspo_terms(b: Batch, *, eps: float = 0.2, c_pos: float = 3.0, c_neg: float = 3.0) -> Terms:
    a, r, low, x = z_scores(b), ratio(b), certain(b), {}
    for k in r:
        e = eps if k in low else 0.4
        if a[k] >= 0:
            held = smaller(r[k], 1 + e)
            soft = 1 / number(held) > c_pos
            x[k] = -a[k] * (c_pos * b.logp[k] if soft else held / number(held) ** 2)
        else:
            held = larger(r[k], 1 - e)
            x[k] = -a[k] * (c_neg * b.logp[k] if number(held) > c_neg else held)
    return x


# PSPO, RAPID, MDPO --------------------------------------------------------------------------------


def mixed(r: Terms, alpha: float) -> Terms:
    return {k: (1 - alpha) * v + alpha for k, v in r.items()}


def rapid(b: Batch, w: Numbers, over: Callable[[list[float]], float], *, scale: bool) -> Any:
    """w per token; a response's weight in the baseline is the mean of its tokens'."""
    r, a = b.rewards.tolist(), {}
    of_row = {i: mean([w[i, t] for t in row(b, i)]) for i in range(len(b.mask))}
    for members in groups(b).values():
        ws = [of_row[i] for i in members]
        value = sum(of_row[i] * r[i] for i in members) / over(ws)
        spread = std([r[i] for i in members]) + 1e-6 if scale else 1.0
        a |= {i: (r[i] - value) / spread for i in members}
    return a


def rapid_sequence(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 1.2) for k, v in sequence_ratio(b, normalise=False).items()}
    a = everywhere(rapid(b, w, len, scale=False), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


def rapid_token(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 1.1) for k, v in ratio(b).items()}
    a = everywhere(rapid(b, w, sum, scale=True), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


def rapid_mean(b: Batch) -> torch.Tensor:
    w = {k: min(number(v), 2.0) for k, v in sequence_ratio(b, normalise=False).items()}
    a = everywhere(rapid(b, dict.fromkeys(w, 1.0), len, scale=False), b)
    return seq_mean_token_sum(weighted_score(w, a, b), b)


def mdpo(b: Batch, kl: Terms, *, t: float = 1.0) -> torch.Tensor:
    return token_mean(plus(unclipped(ratio(b), z_scores(b)), (1 / t, kl)), b)


def sampled_kl(b: Batch) -> Terms:
    return {k: exp(d) * d - exp(d) + 1 for k, d in log_ratio(b).items()}


def q_log(x: Any, q: float) -> Any:
    return (x ** (1 - q) - 1) / (1 - q)


def tsallis(b: Batch, q: float) -> Terms:
    return {
        k: q_log(exp(b.logp[k]), 2 - q) - q_log(math.exp(number(b.old_logp[k])), 2 - q)
        for k in tokens(b)
    }


# ST-PPO -------------------------------------------------------------------------------------------


def turn_ratio(b: Batch, same: Callable[[int, int, int], bool]) -> Terms:
    d, out = log_ratio(b), {}
    for i, t in tokens(b):
        out[i, t] = exp(mean([d[i, s] for s in row(b, i) if same(i, s, t)]))
    return out


def by_field(b: Batch) -> Terms:
    return turn_ratio(b, lambda i, s, t: bool(b.turn[i, s] == b.turn[i, t]))


def by_run(b: Batch) -> Terms:
    return turn_ratio(b, lambda i, s, t: bool(b.mask[i, min(s, t) : max(s, t) + 1].all()))


def st_ppo(b: Batch, w: Terms, clip: float) -> torch.Tensor:
    raw = gae(token_rewards(b), b, gamma=1.0, lam=1.0)
    x = clipped_between(w, whitened(raw), lambda k: (1 - clip, 1 + clip))
    return seq_mean_token_mean(plus(x, (1.0, value_terms(b, raw, clip=0.5))), b)


def st_ppo_group(b: Batch) -> torch.Tensor:
    x = clipped_between(by_field(b), z_scores(b), lambda k: (0.9, 1.1))
    return token_mean(plus(x, (0.1, k3(b, b.ref_logp))), b)


# GRPO-Guard ---------------------------------------------------------------------------------------


def mean_gap(b: Batch, other: Any) -> Terms:
    out = {}
    for i, t in tokens(b):
        gaps = [(b.mean[i, t, j] - number(other[i, t, j])) ** 2 for j in range(b.mean.shape[-1])]
        out[i, t] = mean(gaps) / (2 * number(b.noise[i, t]) ** 2)
    return out


def guard_ratio(b: Batch) -> Terms:
    d, gap = log_ratio(b), mean_gap(b, b.old_mean)
    return {k: exp(number(b.noise[k]) * (d[k] + gap[k])) for k in d}


def guard(b: Batch, r: Terms, clip: float, weight: Callable[[Any], float], most: float) -> Terms:
    a = {k: bounded(v, -most, most) for k, v in z_scores(b).items()}
    x = clipped_between(r, a, lambda k: (1 - clip, 1 + clip))
    return times(x, {k: weight(k) for k in x})


def guard_flow(b: Batch) -> torch.Tensor:
    return token_mean(guard(b, guard_ratio(b), 0.02, lambda k: 1 / number(b.step_size[k]), 5.0), b)


def guard_dance(b: Batch) -> torch.Tensor:
    def weight(k: Any) -> float:
        t = number(b.time[k])
        return (1 + 0.3**2 * (1 - t) / (2 * t)) / number(b.step_size[k])

    x = guard(b, guard_ratio(b), 0.05, weight, 0.8)
    return token_mean(plus(x, (0.1, mean_gap(b, b.ref_mean))), b)


def guard_tokens(b: Batch) -> torch.Tensor:
    d, kl = log_ratio(b), full_kl(b, "beta_pi")
    r = {k: exp(d[k] + kl[k]) for k in d}
    return token_mean(guard(b, r, 0.2, lambda k: 1.0, 5.0), b)


TRUST: dict[str, Reference] = {
    "dcpo": dcpo,
    "dcpo-code": lambda b: token_mean(dcpo_terms(b, 0.02, 0.03, dual=1.2), b),
    "bapo": lambda b: bapo(b, lambda b, a: searched_official(b, a, 1.45), dual=1.1),
    "bapo-paper": lambda b: bapo(
        b, lambda b, a: searched_paper(b, a, share_paper, 0.53, (0.8, 1.01), (0.9, 3.0))
    ),
    "bapo-gradient": lambda b: bapo(
        b, lambda b, a: searched_paper(b, a, share_gradient, 0.5, (0.7, 1.0), (1.0, 3.0))
    ),
    "aspo": lambda b: token_mean(plus(aspo_terms(b), (0.001, k3(b, b.ref_logp))), b),
    "aspo-capped": lambda b: seq_mean_token_mean(aspo_terms(b, eps=0.1, c_pos=1.1, c_neg=1.2), b),
    "pspo": lambda b: token_mean(unclipped(mixed(ratio(b), 0.1), z_scores(b)), b),
    "pspo-sequence": lambda b: token_mean(unclipped(mixed(sequence_ratio(b), 0.3), z_scores(b)), b),
    "rapid": rapid_sequence,
    "rapid-token": rapid_token,
    "rapid-mean": rapid_mean,
    "mdpo": lambda b: mdpo(b, sampled_kl(b)),
    "mdpo-k3": lambda b: mdpo(b, k3(b, b.old_logp), t=0.5),
    "mdpo-exact": lambda b: mdpo(b, full_kl(b, "pi_beta")),
    "mdpo-tsallis": lambda b: mdpo(b, tsallis(b, 1.5)),
    "st-ppo": lambda b: st_ppo(b, by_field(b), 0.05),
    "st-ppo-group": st_ppo_group,
    "s-ppo": lambda b: st_ppo(b, ratio(b), 0.2),
    "turn-ppo": lambda b: st_ppo(b, by_run(b), 0.05),
    "grpo-guard": guard_flow,
    "grpo-guard-dance": guard_dance,
    "grpo-guard-plain": lambda b: token_mean(guard(b, ratio(b), 0.2, lambda k: 1.0, 5.0), b),
    "grpo-guard-tokens": guard_tokens,
}
