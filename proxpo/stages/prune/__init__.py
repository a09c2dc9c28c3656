"""Pruning: responses that leave the batch once their advantages are known."""

from proxpo.stages.prune.largest import largest_advantages
from proxpo.stages.prune.segments import segments
from proxpo.stages.prune.void import has_void, is_void, void_turns

__all__ = [
    "has_void",
    "is_void",
    "largest_advantages",
    "segments",
    "void_turns",
]
