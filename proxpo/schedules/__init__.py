"""What optimizer steps a rollout gets. A schedule's function is given `Updates`, and makes them."""

from proxpo.schedules._types import Updates
from proxpo.schedules.counts import inner_steps, poisson_replay, single_update
from proxpo.schedules.fast_slow import fast_slow
from proxpo.schedules.fixup import fixup
from proxpo.schedules.line_search import line_search
from proxpo.schedules.reincarnation import reincarnation

__all__ = [
    "Updates",
    "fast_slow",
    "fixup",
    "inner_steps",
    "line_search",
    "poisson_replay",
    "reincarnation",
    "single_update",
]
