"""Selections of tokens: factors on the whole token loss, regularisers included."""

from proxpo.stages.select.curvature import curvature_mask
from proxpo.stages.select.probability import probability_split

__all__ = [
    "curvature_mask",
    "probability_split",
]
