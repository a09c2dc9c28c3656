"""Log-probabilities of the proximal policy."""

import torch
from helpers import close, crafted

from proxpo.stages.ratio import proximal_logp


def prox_at(lag: float, prox: str = "a3po") -> torch.Tensor:
    batch = crafted([[0.6, -0.3]], [1.0], lag=torch.full((1, 2), lag))
    return proximal_logp(batch, prox=prox), batch


def test_lag_zero_differs_between_article_and_code() -> None:
    p, batch = prox_at(0, "a3po")
    close(p, batch.logp)
    p, batch = prox_at(0, "areal")
    close(p, batch.old_logp)
    for lag in (1, 2, 5):
        close(prox_at(lag, "a3po")[0], prox_at(lag, "areal")[0])
