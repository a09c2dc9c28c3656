"""Curves of several runs at steps that all of them have."""

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np

from proxpo.report.metrics import Series


class CommonSteps(NamedTuple):
    """Values of every run at `steps`; interpolated: not all of them were measured there."""

    steps: np.ndarray
    curves: dict[int, Series]
    interpolated: bool = False


def align_curves(curves: Mapping[int, Series]) -> CommonSteps:
    """The steps that every curve has.

    Curves that share no step but their first are taken at the steps of any of them that lie within
    all, linear between measurements: enough to look at, too little for a verdict, as a straight
    line lies below a curve that rises ever more slowly. Curves that do not overlap have no steps.
    """
    if not curves:
        return CommonSteps(np.empty(0), {})
    steps = [curve.steps for curve in curves.values()]
    first, last = max(each[0] for each in steps), min(each[-1] for each in steps)
    shared = reduce(np.intersect1d, steps)
    if len(shared) and (shared[-1] > first or first == last):
        exact = {i: Series(shared, y[np.isin(x, shared)]) for i, (x, y) in curves.items()}
        return CommonSteps(shared, exact)
    grid = reduce(np.union1d, steps)
    grid = grid[(grid >= first) & (grid <= last)]
    between = {i: Series(grid, np.interp(grid, x, y)) for i, (x, y) in curves.items()}
    return CommonSteps(grid, between, interpolated=True)


__all__ = ["CommonSteps", "align_curves"]
