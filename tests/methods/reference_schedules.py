"""Plain loops for the losses inside SFPO, FixPO, ReMix, TRPO and PROMA."""

from typing import Any

import torch

from methods.reference import (
    Reference,
    bounded,
    exp,
    larger,
    number,
    row,
    score,
    seq_mean_token_mean,
    token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch


def ratio(b: Batch, i: int, t: int) -> Any:
    return torch.exp(b.logp[i, t] - number(b.old_logp[i, t]))


def k3(now: Any, other: float) -> Any:
    return exp(other - now) - (other - now) - 1


def sfpo(b: Batch, *, low: float = 0.2, high: float = 0.2, kl_coef: float = 0.0) -> Any:
    """GRPO's loss: the schedule alone makes the method."""
    a, x = z_scores(b), {}
    for i, t in tokens(b):
        r = ratio(b, i, t)
        x[i, t] = larger(-a[i, t] * r, -a[i, t] * bounded(r, 1 - low, 1 + high))
        if kl_coef:
            x[i, t] = x[i, t] + kl_coef * k3(b.logp[i, t], number(b.ref_logp[i, t]))
    return seq_mean_token_mean(x, b)


def fixpo(b: Batch, *, beta: float, exact: bool = True, entropy_coef: float = 0.0) -> Any:
    a, x = z_scores(b), {}
    for i, t in tokens(b):
        if exact:
            old = [number(v) for v in b.old_vocab_logp[i, t]]
            kl = sum(exp(p) * (p - q) for p, q in zip(old, b.vocab_logp[i, t]))
        else:
            r = ratio(b, i, t)
            kl = r - 1 - torch.log(r)
        x[i, t] = -a[i, t] * ratio(b, i, t) + beta * kl - entropy_coef * b.entropy[i, t]
    return token_mean(x, b)


def remix(b: Batch, *, clip: float, kl_coef: float, lam: float, entropy_coef: float = 0.0) -> Any:
    a, x = z_scores(b), {}
    for i, t in tokens(b):
        r = ratio(b, i, t)
        c = exp(number(b.prox_logp[i, t]) - number(b.old_logp[i, t]))
        base = k3(b.logp[i, t], number(b.ref_logp[i, t]))
        before = k3(b.logp[i, t], number(b.prev_logp[i, t]))
        x[i, t] = (
            larger(-a[i, t] * r, -a[i, t] * bounded(r, c - clip, c + clip))
            + kl_coef * (lam * base + (1 - lam) * before)
            - entropy_coef * b.entropy[i, t]
        )
    return token_mean(x, b)


def trpo(b: Batch, *, per_token: bool = True) -> Any:
    a = z_scores(b)
    total = sum(-a[i, t] * ratio(b, i, t) for i, t in tokens(b))
    return total / (
        len(tokens(b)) if per_token else sum(1 for i in range(len(b.mask)) if row(b, i))
    )


SCHEDULES: dict[str, Reference] = {
    "sfpo": sfpo,
    "sfpo-kl": lambda b: sfpo(b, low=0.1, high=0.05, kl_coef=0.1),
    "fixpo": lambda b: fixpo(b, beta=0.7),
    "fixpo-sampled": lambda b: fixpo(b, beta=1.0, exact=False, entropy_coef=0.01),
    "remix": lambda b: remix(b, clip=0.1, kl_coef=0.2, lam=1.0),
    "remix-half": lambda b: remix(b, clip=0.2, kl_coef=0.3, lam=0.25, entropy_coef=0.02),
    "trpo": trpo,
    "trpo-sequence": lambda b: trpo(b, per_token=False),
    "proma": lambda b: sum(score(z_scores(b), b).values()),
}
