"""Curves of several runs at the same steps, so that no run is compared at a step of its own."""

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np

from proxpo.report.metrics import Series


class Aligned(NamedTuple):
    """Every run's values at `steps`; `interpolated` where they were not all measured there."""

    steps: np.ndarray
    curves: dict[int, Series]
    interpolated: bool = False


def align(curves: Mapping[int, Series]) -> Aligned:
    """The steps that every curve has.

    Curves that share no step but their first are taken at the steps of any of them that lie within
    all, linear between measurements: enough to look at, too little for a verdict, as a straight
    line lies below a curve that rises ever more slowly. Curves that do not overlap have no steps.
    """
    if not curves:
        return Aligned(np.empty(0), {})
    steps = [one.steps for one in curves.values()]
    first, last = max(one[0] for one in steps), min(one[-1] for one in steps)
    shared = reduce(np.intersect1d, steps)
    if len(shared) and (shared[-1] > first or first == last):
        exact = {i: Series(shared, y[np.isin(x, shared)]) for i, (x, y) in curves.items()}
        return Aligned(shared, exact)
    grid = reduce(np.union1d, steps)
    grid = grid[(grid >= first) & (grid <= last)]
    between = {i: Series(grid, np.interp(grid, x, y)) for i, (x, y) in curves.items()}
    return Aligned(grid, between, interpolated=True)


__all__ = ["Aligned", "align"]
