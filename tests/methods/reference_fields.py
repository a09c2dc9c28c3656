"""Plain loops for the methods that read durations, turns, spans, features or hidden states."""

import math
from collections.abc import Callable
from typing import Any

import torch

from methods.reference import (
    Numbers,
    Reference,
    clipped,
    everywhere,
    gae,
    groups,
    informative,
    k3,
    kept,
    mean,
    number,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    sequence_ratio,
    std,
    times,
    token_mean,
    token_rewards,
    value_terms,
    whitened,
)
from proxpo import Batch

# Duration-aware -----------------------------------------------------------------------------------


def duration_weights(b: Batch, *, least: float = 0.0, most: float = math.inf) -> Numbers:
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    seconds = {i: max(number(b.duration[i]), least) for i in rows}
    usual = mean(list(seconds.values()))
    return everywhere({i: min(s / usual, most) if usual else 1.0 for i, s in seconds.items()}, b)


def duration_aware(b: Batch, w: Numbers, *, gamma: float = 1.0, whiten: bool = True) -> Any:
    raw = gae(token_rewards(b), b, gamma=gamma, lam=1.0)
    x = times(clipped(ratio(b), whitened(raw) if whiten else raw, 0.2, 0.2), w)
    return token_mean(plus(x, (1.0, value_terms(b, raw, clip=0.5))), b)


# SimpleTIR ----------------------------------------------------------------------------------------


def z_scores_of(b: Batch, counted: list[bool]) -> Numbers:
    """Standardised among the counted members of the group; 0 for the others."""
    out = dict.fromkeys(range(len(b.mask)), 0.0)
    for members in groups(b).values():
        mine = [i for i in members if counted[i]]
        r = [number(b.rewards[i]) for i in mine]
        for i, x in zip(mine, r):
            out[i] = x if len(r) == 1 else (x - mean(r)) / (std(r) + 1e-6)
    return everywhere(out, b)


def simpletir(b: Batch, *, nonvoid: bool, cut: bool, prune: bool = True, dual: float = 3.0) -> Any:
    void, long = b.void.tolist(), b.truncated.tolist()
    counted = [
        bool(row(b, i)) and not (nonvoid and void[i]) and not (cut and long[i])
        for i in range(len(void))
    ]
    a = z_scores_of(b, counted)
    rest = kept(b, lambda i, t: not (prune and void[i]) and not (cut and long[i]))
    return rest, clipped(ratio(rest), a, 0.2, 0.28, dual=dual)


def simpletir_loss(b: Batch, **options: Any) -> torch.Tensor:
    rest, x = simpletir(b, **options)
    return token_mean(x, rest)


def simpletir_strict(b: Batch) -> torch.Tensor:
    rest, x = simpletir(b, nonvoid=True, cut=True)
    return token_mean(plus(x, (0.1, k3(rest, b.ref_logp))), rest)


# G2RL ---------------------------------------------------------------------------------------------


def cosine(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y)) / (math.hypot(*x) * math.hypot(*y))


def novelties(b: Batch, members: list[int]) -> dict[int, float]:
    phi, r, out = b.features.tolist(), b.rewards.tolist(), {}
    for i in members:
        others = [j for j in members if j != i]
        total = sum(math.exp(r[j]) for j in others)
        seen = sum(math.exp(r[j]) / total * cosine(phi[i], phi[j]) ** 2 for j in others)
        out[i] = max(1 - seen, 0.0)
    return out


def novel_rewards(b: Batch, factor: Callable[[float, float], float], clip: float) -> list[float]:
    out = b.rewards.tolist()
    for members in groups(b).values():
        nu = novelties(b, members)
        low, high = min(nu.values()), max(nu.values())
        for i in members:
            f = factor(out[i], (nu[i] - low) / (high - low)) if high - low > 1e-6 else 1.0
            out[i] = min(max(out[i] * f, -clip), clip)
    return out


def g2rl_advantages(
    b: Batch, factor: Callable[[float, float], float], *, clip: float = 3.0, ddof: int = 0
) -> Numbers:
    r, out = novel_rewards(b, factor, clip), {}
    for members in groups(b).values():
        mine = [r[i] for i in members]
        for i in members:
            out[i] = (r[i] - mean(mine)) / (std(mine, ddof=ddof) + 1e-6)
    return everywhere(out, b)


def g2rl(b: Batch, factor: Callable[[float, float], float], *, clip: float = 3.0) -> Any:
    x = clipped(ratio(b), g2rl_advantages(b, factor, clip=clip), 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (0.001, k3(b, b.ref_logp))), b)


def g2rl_signed(b: Batch) -> torch.Tensor:
    a = g2rl_advantages(b, lambda r, nu: 1 + (2 * nu - 1), ddof=1)
    rows = informative(b)
    rest = kept(b, lambda i, t: i in rows)
    x = clipped(sequence_ratio(rest, normalise=False), a, 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (0.001, k3(rest, b.ref_logp))), rest)


FIELDS: dict[str, Reference] = {
    "duration-aware": lambda b: duration_aware(b, duration_weights(b)),
    "duration-aware-bounded": lambda b: duration_aware(
        b, duration_weights(b, least=2.0, most=1.2), gamma=0.9, whiten=False
    ),
    "simpletir": lambda b: simpletir_loss(b, nonvoid=False, cut=False, dual=1.2),
    "simpletir-nonvoid": simpletir_strict,
    "g2rl": lambda b: g2rl(b, lambda r, nu: 1 + nu),
    "g2rl-printed": lambda b: g2rl(b, lambda r, nu: 1 + 2 * r * nu, clip=1.5),
    "g2rl-signed": g2rl_signed,
    "simpletir-unfiltered": lambda b: simpletir_loss(b, nonvoid=False, cut=False, prune=False),
}
