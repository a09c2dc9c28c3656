"""Filters of prompts, responses and tokens. A filter shrinks the mask and every denominator."""

from proxpo.stages.filter.denoising import noisy_steps
from proxpo.stages.filter.filters import fresh_enough, informative, not_truncated, reject
from proxpo.stages.filter.latent import without_thoughts

__all__ = [
    "fresh_enough",
    "informative",
    "noisy_steps",
    "not_truncated",
    "reject",
    "without_thoughts",
]
