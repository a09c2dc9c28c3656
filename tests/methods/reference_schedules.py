"""Plain loops for the losses inside SFPO, FixPO, ReMix, TRPO and PROMA."""

from typing import Any

import torch

from methods.loops import (
    Reference,
    clipped,
    clipped_between,
    entropies,
    full_kl,
    k3,
    number,
    plus,
    ratio,
    score,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
    unclipped,
    z_scores,
)
from proxpo import Batch


def sfpo(b: Batch, *, low: float = 0.2, high: float = 0.2, kl_coef: float = 0.0) -> Any:
    """GRPO's loss: the schedule alone makes the method."""
    x = clipped(ratio(b), z_scores(b), low, high)
    return seq_mean_token_mean(plus(x, (kl_coef, k3(b, b.ref_logp))), b)


def fixpo(b: Batch, *, beta: float, exact: bool = True, entropy_coef: float = 0.0) -> Any:
    r = ratio(b)
    kl = full_kl(b, "beta_pi") if exact else {k: x - 1 - torch.log(x) for k, x in r.items()}
    x = unclipped(r, z_scores(b))
    return token_mean(plus(x, (beta, kl), (-entropy_coef, entropies(b))), b)


def remix(b: Batch, *, clip: float, kl_coef: float, lam: float, entropy_coef: float = 0.0) -> Any:
    r = ratio(b)
    c = {k: number(torch.exp(b.prox_logp[k] - b.old_logp[k])) for k in r}
    x = clipped_between(r, z_scores(b), lambda k: (c[k] - clip, c[k] + clip))
    anchors = (kl_coef * lam, k3(b, b.ref_logp)), (kl_coef * (1 - lam), k3(b, b.prev_logp))
    return token_mean(plus(x, *anchors, (-entropy_coef, entropies(b))), b)


SCHEDULES: dict[str, Reference] = {
    "sfpo": sfpo,
    "sfpo-kl": lambda b: sfpo(b, low=0.1, high=0.05, kl_coef=0.1),
    "fixpo": lambda b: fixpo(b, beta=0.7),
    "fixpo-sampled": lambda b: fixpo(b, beta=1.0, exact=False, entropy_coef=0.01),
    "remix": lambda b: remix(b, clip=0.1, kl_coef=0.2, lam=1.0),
    "remix-half": lambda b: remix(b, clip=0.2, kl_coef=0.3, lam=0.25, entropy_coef=0.02),
    "trpo": lambda b: token_mean(unclipped(ratio(b), z_scores(b)), b),
    "trpo-sequence": lambda b: seq_mean_token_sum(unclipped(ratio(b), z_scores(b)), b),
    "proma": lambda b: sum(score(z_scores(b), b).values()),
}
