"""All figures of a comparison, in reading order."""

from proxpo.report.analysis import Analysis
from proxpo.report.curve_figures import curve_figures, drift_figure
from proxpo.report.figures import Figure
from proxpo.report.metrics import CURVES, SCORE
from proxpo.report.point_figures import (
    cost_figure,
    difference_figure,
    robustness_figures,
    tuning_figure,
)

INSIDE = "What happened inside"


def all_figures(analysis: Analysis) -> list[Figure]:
    """Every figure that the runs have data for."""
    return [
        *curve_figures(analysis, [SCORE], "Results"),
        *difference_figure(analysis),
        *drift_figure(analysis),
        *curve_figures(analysis, CURVES[:2], "Results"),
        *robustness_figures(analysis),
        *tuning_figure(analysis),
        *curve_figures(analysis, CURVES[2:], INSIDE),
        *cost_figure(analysis),
    ]


__all__ = ["all_figures"]
