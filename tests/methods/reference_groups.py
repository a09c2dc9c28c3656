"""Plain loops for GRPO and its neighbours."""

import math
from collections.abc import Callable
from typing import Any

import torch

from methods.loops import (
    Numbers,
    Reference,
    Terms,
    bounded,
    centred,
    clipped,
    everywhere,
    exp,
    grpo_terms,
    informative,
    k3,
    kept,
    larger,
    log_ratio,
    mean,
    number,
    plus,
    process_scores,
    prompt_mean,
    ratio,
    row,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_ratio,
    smaller,
    std,
    token_mean,
    tokens,
    unclipped,
    weighted_score,
    z_scores,
)
from proxpo import Batch


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


GROUPS: dict[str, Reference] = {
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
}
