"""Log-probabilities -> importance ratios."""

from proxpo.ratios.gaussian import gaussian, recentred
from proxpo.ratios.kalman import ema, kalman
from proxpo.ratios.own import current, log_ratio
from proxpo.ratios.proximal import PROXIMAL, proximal_logp
from proxpo.ratios.sequence import geometric_clip, sequence
from proxpo.ratios.smoothed import smoothed
from proxpo.ratios.token import log_ratio_to_ref, none, token
from proxpo.ratios.turn import turn

__all__ = [
    "PROXIMAL",
    "current",
    "ema",
    "gaussian",
    "geometric_clip",
    "kalman",
    "log_ratio",
    "log_ratio_to_ref",
    "none",
    "proximal_logp",
    "recentred",
    "sequence",
    "smoothed",
    "token",
    "turn",
]
