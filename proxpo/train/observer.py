"""Callbacks of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OnProgress = Callable[[str, int, int], None]  # phase, done, total


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Callbacks of a run; one that is not given does nothing.

    on_progress(phase, done, total): work inside a step; an error raised here gives the rollout or
        evaluation up
    on_notice(line): a line worth reading
    on_step(step, metrics): a finished step
    """

    on_progress: OnProgress = lambda phase, done, total: None
    on_notice: Callable[[str], None] = lambda line: None
    on_step: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None


SILENT = Observer()

__all__ = ["SILENT", "Observer", "OnProgress"]
