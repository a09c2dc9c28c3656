"""Log-probabilities -> importance ratios."""

from proxpo.ratios.kalman import ema, kalman
from proxpo.ratios.proximal import PROXIMAL, proximal_logp
from proxpo.ratios.sequence import geometric_clip, sequence
from proxpo.ratios.token import log_ratio_to_ref, none, token

__all__ = [
    "PROXIMAL",
    "ema",
    "geometric_clip",
    "kalman",
    "log_ratio_to_ref",
    "none",
    "proximal_logp",
    "sequence",
    "token",
]
