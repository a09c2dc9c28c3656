"""Plain loops for the methods of rewards, advantages, tokens and budgets."""

import math
from typing import Any

import torch

from methods.loops import (
    Numbers,
    Reference,
    Terms,
    centred,
    clipped,
    exp,
    groups,
    k3,
    kept,
    log_ratio,
    mean,
    number,
    plus,
    ratio,
    row,
    seq_mean_token_mean,
    times,
    token_mean,
    tokens,
    z_scores,
)
from proxpo import Batch

# PACS ---------------------------------------------------------------------------------------------


def label_weight(labels: list[bool], mine: bool, balance: str) -> float:
    if balance == "question":
        same = sum(one == mine for one in labels)
        return 1.0 if same == len(labels) else len(labels) / (2 * same)
    return {"none": 1.0, "only_positive": float(mine), "only_negative": float(not mine)}[balance]


def group_scores(r: list[Any], score: str) -> list[Any]:
    if score == "plain":
        return r
    if score == "leave_one_out":
        return [x - mean([y for j, y in enumerate(r) if j != i]) for i, x in enumerate(r)]
    u = [x - mean(r) for x in r]
    if score == "centred":
        return u
    spread = torch.sqrt(sum(x * x for x in u) / (len(u) - 1))
    return [x / (spread + 1e-6) for x in u]


def pacs(b: Batch, *, score: str, balance: str, beta: float = 1.0, averaged: bool = False) -> Any:
    d = {(i, t): b.logp[i, t] for i, t in tokens(b)} if averaged else log_ratio(b)
    terms = []
    for members in groups(b).values():
        r = [beta * sum(d[i, t] for t in row(b, i)) / (len(row(b, i)) if averaged else 1)
             for i in members]  # fmt: skip
        labels = [bool(b.correct[i]) for i in members]
        for psi, y in zip(group_scores(r, score), labels):
            bce = torch.log(1 + exp(-psi)) if y else torch.log(1 + exp(psi))
            terms.append(label_weight(labels, y, balance) * bce)
    return mean(terms)


# GTPO ---------------------------------------------------------------------------------------------


def run_length(mine: list[int], good: list[list[int]], bad: list[list[int]]) -> int:
    """Leading tokens that some good and some bad response have at the same place."""
    for t, token in enumerate(mine):
        here = [any(len(x) > t and x[t] == token for x in side) for side in (good, bad)]
        if not all(here):
            return t
    return len(mine)


def token_runs(b: Batch) -> dict[int, tuple[int, int]]:
    a, out = centred(b), {}
    ids = {i: [int(b.tokens[i, t]) for t in row(b, i)] for i in range(len(b.mask))}
    for members in groups(b).values():
        exact = [b.rewards[i] == b.rewards[members[0]] for i in members]
        good = [ids[i] for i in members if a[i] > 1e-12 and not all(exact)]
        bad = [ids[i] for i in members if a[i] < -1e-12 and not all(exact)]
        for i in members:
            judged = abs(a[i]) > 1e-12
            lead = run_length(ids[i], good, bad)
            trail = run_length(ids[i][::-1], [x[::-1] for x in good], [x[::-1] for x in bad])
            out[i] = (lead, trail) if judged else (0, 0)
    return out


def conflict_weights(b: Batch, boost: float) -> Numbers:
    a, runs, out = centred(b), token_runs(b), {}
    for i, t in tokens(b):
        place, n = row(b, i).index(t), len(row(b, i))
        inside = boost if a[i] > 0 else 0.0
        out[i, t] = 1.0
        out[i, t] *= inside if place < runs[i][0] else 1.0
        out[i, t] *= inside if n - 1 - place < runs[i][1] else 1.0
    return out


def gtpo(b: Batch, *, gamma: float, most: float, boost: float = 2.0, code: bool = False) -> Any:
    a, lam, runs = centred(b), conflict_weights(b, boost), token_runs(b)
    rows = [i for i in range(len(b.mask)) if row(b, i)]
    h = {i: mean([number(b.entropy[i, t]) for t in row(b, i)]) for i in rows}
    active = code or mean(list(h.values())) <= most
    total = 0.0
    for i in rows:
        shaped = 0.0 if active and h[i] > most else a[i] - gamma * h[i]
        own = [exp(b.logp[i, t] - number(b.logp[i, t])) * lam[i, t] for t in row(b, i)]
        part = -shaped * mean(own)
        total = total + part / (max(1, *runs[i]) if code else len(rows))
    return total


# EMPG ---------------------------------------------------------------------------------------------


def step_of(b: Batch, i: int, t: int, steps: str) -> int:
    if steps == "turn":
        return int(b.turn[i, t])
    if steps == "response":
        return 0
    return sum(1 for s in row(b, i) if s <= t and s - 1 not in row(b, i))


def empg(b: Batch, *, k: float, k_next: float, bonus: float, steps: str, base: dict) -> Numbers:
    found: dict[tuple[int, int], list[float]] = {}
    for i, t in tokens(b):
        found.setdefault((i, step_of(b, i, t, steps)), []).append(number(b.entropy[i, t]))
    h = {at: mean(values) for at, values in found.items()}
    low, high = min(h.values()), max(h.values())
    h = {at: (value - low) / (high - low + 1e-8) for at, value in h.items()}
    norm = mean([math.exp(-k * value) for value in h.values()]) + 1e-8
    out = {}
    for i, s in h:
        later = sorted(other for row_number, other in h if row_number == i and other > s)
        clear = math.exp(-k_next * h[i, later[0]]) if later else 0.0
        out[i, s] = base[i] * math.exp(-k * h[i, s]) / norm + bonus * clear
    middle = mean(list(out.values()))
    return {(i, t): out[i, step_of(b, i, t, steps)] - middle for i, t in tokens(b)}


def row_scores(b: Batch) -> dict[int, float]:
    return {i: value for (i, _), value in z_scores(b).items()}


def empg_loss(a: Numbers, b: Batch, *, kl_coef: float = 0.0) -> Any:
    x = clipped(ratio(b), a, 0.2, 0.2)
    return seq_mean_token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


# EARL ---------------------------------------------------------------------------------------------


def quantile(values: list[float], q: float) -> float:
    ordered, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def earl(b: Batch, *, share: float, per: str = "response", gated: bool = False, kl_coef: float = 0):
    h = {k: number(b.entropy[k]) for k in tokens(b)}
    gate: Numbers = {}
    for k in h:
        pool = [v for (i, _), v in h.items() if per == "batch" or i == k[0]]
        gate[k] = float(h[k] >= quantile(pool, 1 - share) - 1e-12)
    x = times(clipped(ratio(b), z_scores(b), 0.2, 0.2), gate)
    n = sum(gate.values()) if gated else len(h)
    return sum(x.values()) / n + kl_coef * token_mean(k3(b, b.ref_logp), b)


# Budgets and pruning ------------------------------------------------------------------------------


def palu(b: Batch) -> Any:
    failed = [0.0 if cut else r for r, cut in zip(b.rewards.tolist(), b.truncated.tolist())]
    b = b.replace(rewards=torch.tensor(failed, dtype=torch.float64))
    return seq_mean_token_mean(clipped(ratio(b), z_scores(b), 0.2, 0.2), b)


def pruned(b: Batch, *, rate: float, pool: str = "question", largest: bool = False) -> Terms:
    """The clipped terms of the kept responses, advantages from the full groups."""
    a = z_scores(b, eps=1e-4)
    size = {i: abs(value) for (i, _), value in a.items()}
    pools = groups(b).values() if pool == "question" else [list(range(len(b.mask)))]
    chosen: set[int] = set()
    for members in pools:
        there = [i for i in members if i in size]
        order = sorted(there, key=lambda i: (size[i] if largest else -size[i], i))
        chosen |= set(order[: math.floor(len(there) * (1 - rate) + 1e-9)])
    left = kept(b, lambda i, t: i in chosen)
    return left, clipped(ratio(left), a, 0.2, 0.2)


def cppo(b: Batch) -> Any:
    left, x = pruned(b, rate=0.5)
    return seq_mean_token_mean(plus(x, (0.04, k3(left, left.ref_logp))), left)


def cppo_batch(b: Batch) -> Any:
    left, x = pruned(b, rate=0.3, pool="batch")
    return token_mean(plus(x, (0.04, k3(left, left.ref_logp))), left)


def cppo_largest(b: Batch) -> Any:
    left, x = pruned(b, rate=1 / 3, largest=True)
    return seq_mean_token_mean(x, left)


def knapsack(b: Batch) -> Any:
    a = {k: max(-0.9, min(0.9, value)) for k, value in z_scores(b).items()}
    return token_mean(clipped(ratio(b), a, 0.2, 0.28), b)


TOKENS: dict[str, Reference] = {
    "pacs": lambda b: pacs(b, score="leave_one_out", balance="question"),
    "pacs-standardised": lambda b: pacs(b, score="standardised", balance="only_positive"),
    "pacs-centred": lambda b: pacs(b, score="centred", balance="only_negative", beta=0.5),
    "pacs-plain": lambda b: pacs(b, score="plain", balance="none", averaged=True),
    "gtpo": lambda b: gtpo(b, gamma=0.1, most=math.log(2)),
    "gtpo-filtered": lambda b: gtpo(b, gamma=0.3, most=1.1, boost=3.0),
    "gtpo-code": lambda b: gtpo(b, gamma=0.1, most=0.7, code=True),
    "redit": lambda b: seq_mean_token_mean(clipped(ratio(b), z_scores(b), 0.2, 0.2), b),
    "empg": lambda b: empg_loss(
        empg(b, k=1.0, k_next=1.0, bonus=0.1, steps="turn", base=row_scores(b)), b
    ),
    "empg-response": lambda b: empg_loss(
        empg(b, k=2.0, k_next=1.0, bonus=0.1, steps="response", base=centred(b)), b
    ),
    "empg-runs": lambda b: empg_loss(
        empg(b, k=1.0, k_next=3.0, bonus=0.5, steps="mask", base=row_scores(b)), b, kl_coef=0.1
    ),
    "earl": lambda b: earl(b, share=0.2),
    "earl-gated": lambda b: earl(b, share=0.5, gated=True, kl_coef=0.1),
    "earl-batch": lambda b: earl(b, share=0.4, per="batch"),
    "earl-batch-gated": lambda b: earl(b, share=0.4, per="batch", gated=True),
    "palu": palu,
    "cppo": cppo,
    "cppo-largest": cppo_largest,
    "cppo-batch": cppo_batch,
    "knapsack-rl": knapsack,
}
