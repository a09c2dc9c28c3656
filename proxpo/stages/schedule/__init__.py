"""Schedules: the optimizer steps of a rollout, made by a function that is given `Updates`."""

from proxpo.stages.schedule._types import Rescale, Updates, variants
from proxpo.stages.schedule.clipping_bias import clipping_bias
from proxpo.stages.schedule.counts import inner_steps, poisson_replay, single_update
from proxpo.stages.schedule.fast_slow import fast_slow
from proxpo.stages.schedule.fixup import fixup
from proxpo.stages.schedule.line_search import line_search
from proxpo.stages.schedule.passes import split_passes
from proxpo.stages.schedule.reincarnation import reincarnation
from proxpo.stages.schedule.transitions import transition_buffer

__all__ = [
    "Rescale",
    "Updates",
    "clipping_bias",
    "fast_slow",
    "fixup",
    "inner_steps",
    "line_search",
    "poisson_replay",
    "reincarnation",
    "single_update",
    "split_passes",
    "transition_buffer",
    "variants",
]
