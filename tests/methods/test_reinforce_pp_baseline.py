"""Its limits are beside those of the plain variant, in test_reinforce_pp.py."""

import torch

from methods._case import Case
from methods.loops import (
    centred,
    clipped,
    log_ratio,
    plus,
    ratio,
    returns,
    token_mean,
    token_rewards,
    tokens,
    whitened,
)
from proxpo import Batch


def reinforce_pp_baseline(b: Batch) -> torch.Tensor:
    a = returns(token_rewards(b), b)
    r = b.rewards.tolist()
    base = {i: r[i] - c for i, c in centred(b).items()}
    a = whitened({(i, t): a[i, t] - base[i] for i, t in tokens(b)})
    k2 = {k: d**2 / 2 for k, d in log_ratio(b, b.ref_logp).items()}
    return token_mean(plus(clipped(ratio(b), a, 0.2, 0.2), (0.01, k2)), b)


CASES = {
    "reinforce-pp-baseline": Case("reinforce-pp-baseline", {}, reinforce_pp_baseline),
}
