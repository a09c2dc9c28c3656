"""Plain loops for REINFORCE, its baselines, PPO with a critic, and DPO."""

import math
from typing import Any

import torch

from methods.loops import (
    Numbers,
    Reference,
    bounded,
    centred,
    clipped,
    entropies,
    everywhere,
    exp,
    gae,
    groups,
    log_ratio,
    mean,
    number,
    others_mean,
    plus,
    ratio,
    returns,
    row,
    score,
    seq_mean_token_mean,
    seq_mean_token_sum,
    sequence_ratio,
    std,
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


def truncated_reinforce(b: Batch, cap: float, *, sequence: bool) -> torch.Tensor:
    r = sequence_ratio(b, anchor=b.rollout_logp, normalise=False) if sequence else None
    r = ratio(b, b.rollout_logp) if r is None else r
    w = {k: min(number(v), cap) for k, v in r.items()}
    return seq_mean_token_sum(weighted_score(w, reinforce(b), b), b)


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


RETURNS: dict[str, Reference] = {
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
    "dpo": dpo,
    "dpo-smooth": lambda b: dpo(b, smoothing=0.2),
    "dpo-robust": lambda b: dpo(b, smoothing=0.2, robust=True),
    "dpo-ipo": lambda b: ipo(b, averaged=True),
    "dpo-ipo-sum": lambda b: ipo(b, averaged=False),
    "isopo": lambda b: sum(score(z_scores(b), b).values()),
    "isopo-ntk": lambda b: sum(score(z_scores(b), b).values()),
}
