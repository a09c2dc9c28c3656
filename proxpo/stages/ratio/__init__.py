"""Log-probabilities -> importance ratios."""

from proxpo.stages.ratio.current import current, log_ratio
from proxpo.stages.ratio.folded import folded
from proxpo.stages.ratio.gaussian import gaussian, recentred
from proxpo.stages.ratio.kalman import ema, kalman
from proxpo.stages.ratio.latent import latent
from proxpo.stages.ratio.proximal import PROXIMAL, proximal_logp
from proxpo.stages.ratio.sequence import geometric_clip, sequence
from proxpo.stages.ratio.smoothed import smoothed
from proxpo.stages.ratio.token import log_ratio_to_ref, none, token
from proxpo.stages.ratio.turn import turn

__all__ = [
    "PROXIMAL",
    "current",
    "ema",
    "folded",
    "gaussian",
    "geometric_clip",
    "kalman",
    "latent",
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
