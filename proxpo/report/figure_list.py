"""All figures of a comparison, in reading order."""

from proxpo.report.analysis import Analysis
from proxpo.report.curve_figures import cloud, curves
from proxpo.report.figures import Figure
from proxpo.report.metrics import CURVES, SCORE
from proxpo.report.point_figures import cost, differences, robustness, tuning

INSIDE = "What happened inside"


def figures(analysis: Analysis) -> list[Figure]:
    """Everything the runs allow to draw."""
    return [
        *curves(analysis, [SCORE], "Results"),
        *differences(analysis),
        *cloud(analysis),
        *curves(analysis, CURVES[:2], "Results"),
        *robustness(analysis),
        *tuning(analysis),
        *curves(analysis, CURVES[2:], INSIDE),
        *cost(analysis),
    ]


__all__ = ["figures"]
