"""Plain loops for the methods that read durations, turns, spans, features or hidden states."""

import math
from collections.abc import Callable
from typing import Any

import torch

from methods.loops import (
    Numbers,
    Reference,
    centred,
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
    score,
    seq_mean_token_mean,
    sequence_ratio,
    std,
    times,
    token_mean,
    token_rewards,
    tokens,
    value_terms,
    whitened,
    z_scores,
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


# Text2Grad ----------------------------------------------------------------------------------------


def span_rewards(b: Batch, kl: Numbers, coef: float) -> Numbers:
    return {k: number(b.span_rewards[k]) - coef * kl[k] for k in tokens(b)}


def gae_to_hole(rho: Numbers, b: Batch, *, lam: float) -> Numbers:
    """Column by column from the right; a masked column sets the recursion back."""
    out: Numbers = {}
    for i in range(len(b.mask)):
        value_next = advantage_next = 0.0
        for t in reversed(range(b.mask.shape[1])):
            if not b.mask[i, t]:
                value_next = advantage_next = 0.0
                continue
            value = number(b.old_values[i, t])
            advantage_next = out[i, t] = rho[i, t] + value_next - value + lam * advantage_next
            value_next = value
    return out


def text2grad(b: Batch) -> torch.Tensor:
    kl = {k: number(b.ref_kl[k]) for k in tokens(b)}
    raw = gae_to_hole(span_rewards(b, kl, 0.2), b, lam=0.95)
    x = clipped(ratio(b), whitened(raw), 0.2, 0.2)
    return token_mean(plus(x, (0.1, value_terms(b, raw, clip=0.2))), b)


def text2grad_raw(b: Batch) -> torch.Tensor:
    d = {k: number(b.old_logp[k]) - number(b.ref_logp[k]) for k in tokens(b)}
    rho = span_rewards(b, {k: x * x / 2 for k, x in d.items()}, 0.5)
    for k, kept_reward in token_rewards(b).items():
        rho[k] += kept_reward
    raw = gae(rho, b, gamma=0.9, lam=0.8)
    x = plus(clipped(ratio(b), raw, 0.2, 0.2), (0.1, value_terms(b, raw, clip=0.2)))
    too_far = mean([number(r) for r in ratio(b).values()]) > 1.5
    return token_mean(x, b) * (0.0 if too_far else 1.0)


# CAPO ---------------------------------------------------------------------------------------------


def head_shifts(b: Batch, a: Numbers, i: int, t: int, *, k: int, rate: float) -> Any:
    """m_H and m_F of plain gradient steps, from dense matrices over candidates x units."""
    h, logits = b.hidden[i, t].tolist(), b.vocab_logp[i, t].tolist()
    top = sorted(range(len(logits)), key=lambda n: -logits[n])[:k]
    total = sum(math.exp(logits[n]) for n in top)
    pi = [math.exp(logits[n]) / total for n in top]
    v = [float(n == int(b.tokens[i, t])) - p for n, p in zip(top, pi)]
    step = [[a[i, t] * x * y for y in h] for x in v]
    inner = sum(x * x for line in step for x in line)  # <G, Δ> with Δ = G
    u = [sum(x * y for x, y in zip(line, h)) for line in step]
    along = sum(x * y for x, y in zip(v, u))
    fisher = sum(p * x * x for p, x in zip(pi, u)) - sum(p * x for p, x in zip(pi, u)) ** 2
    policy = rate**2 / 2 * along**2
    return rate * inner + rate**2 / 2 * a[i, t] * (along**2 - fisher), policy


def within(
    b: Batch, a: Numbers, bounds: tuple[float, float], *, one: bool = False, **how: Any
) -> Batch:
    """The batch without the tokens whose shifts are too large; its own check that some are."""

    def small(i: int, t: int) -> bool:
        objective, policy = head_shifts(b, a, i, t, **how)
        fits = objective >= 0 and objective < bounds[1] if one else abs(objective) < bounds[1]
        return policy < bounds[0] and fits

    return kept(b, small)


def capo(b: Batch, a: Numbers, rest: Batch) -> torch.Tensor:
    """A response divided by its kept tokens; one without any counts as 0 in the mean."""
    x = clipped(ratio(rest), a, 0.2, 0.2)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    return mean([mean([x[i, t] for t in row(rest, i)]) for i in rows])


def capo_grpo(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    return capo(b, a, within(b, a, (1e-4, 0.01), k=4, rate=0.05))


def capo_one_sided(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    return capo(b, a, within(b, a, (2e-3, 0.01), one=True, k=2, rate=0.4))


def capo_dr_grpo(b: Batch) -> torch.Tensor:
    a = everywhere(centred(b), b)
    rest = within(b, a, (1e-3, 5e-4), k=4, rate=0.02)
    x = clipped(ratio(rest), a, 0.2, 0.2)
    return (
        sum(x.values(), 0.0 * b.logp[0, 0]) / 9 / len([i for i in range(len(b.mask)) if row(b, i)])
    )


def capo_reinforce(b: Batch) -> torch.Tensor:
    a = z_scores(b, eps=1e-4)
    rest = within(b, a, (1e-5, math.inf), k=4, rate=0.04)
    x = score({k: a[k] for k in tokens(rest)}, rest)
    return sum(x.values(), 0.0 * b.logp[0, 0]) / len([i for i in range(len(b.mask)) if row(b, i)])


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
    "text2grad": text2grad,
    "text2grad-raw": text2grad_raw,
    "capo": capo_grpo,
    "capo-one-sided": capo_one_sided,
    "capo-dr-grpo": capo_dr_grpo,
    "capo-reinforce": capo_reinforce,
    "g2rl": lambda b: g2rl(b, lambda r, nu: 1 + nu),
    "g2rl-printed": lambda b: g2rl(b, lambda r, nu: 1 + 2 * r * nu, clip=1.5),
    "g2rl-signed": g2rl_signed,
    "simpletir-unfiltered": lambda b: simpletir_loss(b, nonvoid=False, cut=False, prune=False),
}
