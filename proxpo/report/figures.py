"""Figures as plain data, which the page and the image files draw alike."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxpo.report.metrics import Series

POINTS = 240  # of a curve: more than a panel has pixels to tell apart


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Mean of one arm over the steps with its band, and its runs."""

    arm: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[dict[str, Any]]  # {"run", "x", "y"}: position of the run, its own curve


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Ends of one arm's runs, and the points they passed."""

    arm: str
    points: list[dict[str, Any]]  # {"run", "x", "y"}: the end of each run
    trail: list[dict[str, Any]]  # {"run", "x", "y"}: its way there
    hull: list[tuple[float, float]]  # of the ends


@dataclass(frozen=True, kw_only=True)
class MeanPoint:
    """A mean with its interval above one name on the axis."""

    arm: str  # decides the colour
    group: str  # joined by a line
    at: str
    mean: float
    low: float
    high: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure; `kind` (curves, cloud, means, forest or bars) decides what `data` holds."""

    key: str
    title: str
    kind: str
    caption: str
    x: str
    y: str
    data: list[Any]
    share: bool = False
    log: bool = False  # vertical axis
    ticks: list[str] = field(default_factory=list)  # of an axis of names
    section: str = "Results"


def thin(steps: np.ndarray, values: np.ndarray, most: int = POINTS) -> Series:
    """At most `most` points: means of equal parts (last axis), and the exact last value."""
    n = steps.shape[-1]
    if n <= most:
        return Series(steps, values)
    parts = np.linspace(0, n - 1, most).astype(int)
    length = np.diff(parts)

    def means(array: np.ndarray) -> np.ndarray:
        sums = np.add.reduceat(array[..., : n - 1], parts[:-1], axis=-1)
        return np.concatenate([sums / length, array[..., -1:]], axis=-1)

    return Series(means(steps), means(values))


def digits(values: np.ndarray) -> list[float]:
    """Values rounded to five significant digits; the last one exact."""
    rounded = [float(f"{value:.5g}") for value in values.tolist()]
    return [*rounded[:-1], float(values[-1])] if rounded else []


__all__ = ["POINTS", "Cloud", "Curve", "Figure", "MeanPoint", "digits", "thin"]
