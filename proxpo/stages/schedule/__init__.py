"""What optimizer steps a rollout gets. A schedule's function is given `Updates`, and makes them."""

from proxpo.stages.schedule._types import Updates
from proxpo.stages.schedule.counts import inner_steps, poisson_replay, single_update
from proxpo.stages.schedule.fast_slow import fast_slow
from proxpo.stages.schedule.fixup import fixup
from proxpo.stages.schedule.line_search import line_search
from proxpo.stages.schedule.reincarnation import reincarnation

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
