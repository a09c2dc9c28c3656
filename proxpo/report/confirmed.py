"""Findings of an earlier comparison beside the same differences on seeds that it had not seen."""

from collections import Counter

from proxpo.compare.plan import Finding
from proxpo.report.analysis import Analysis, ArmPair
from proxpo.report.findings import MEASURES, MOST_LINES, format_number, in_favour, span
from proxpo.report.statistics import Interval

HELD, WEAKER, OPEN, TURNED, UNTESTED = (
    "held",
    "held, not after correction",
    "not shown",
    "turned around",
    "not tested",
)


def confirmed_lines(analysis: Analysis) -> list[str]:
    """A sentence for each finding that was to be confirmed, with its verdict at the end."""
    return [_line(finding, analysis) for finding in analysis.comparison.confirms]


def spoken_confirmed(analysis: Analysis) -> list[str]:
    """`confirmed_lines` for a terminal: of many those on the final score, the others counted."""
    shown = list(analysis.comparison.confirms)
    if len(shown) > MOST_LINES:
        shown = [finding for finding in shown if finding.measure == "final"][:MOST_LINES]
    counts = Counter(
        _verdict(finding, _pair(finding, analysis))
        for finding in analysis.comparison.confirms
        if finding not in shown
    )
    words = "; ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    return [
        *(["What was to be confirmed:"] if shown or counts else []),
        *(_line(finding, analysis) for finding in shown),
        *([f"Others: {words}. The report lists them."] if counts else []),
    ]


def _line(finding: Finding, analysis: Analysis) -> str:
    pair, share = _pair(finding, analysis), analysis.variant.share
    measure = MEASURES.get(finding.measure, finding.measure)
    mean = f"{format_number(finding.mean, share=share)}{' points' if share else ''}"
    interval = span(Interval(mean=finding.mean, low=finding.low, high=finding.high), share=share)
    sure = "" if finding.p_holm < 0.05 else ", not after correction"
    text = f"{finding.winner} over {finding.loser} in {measure}: {mean} ({interval}{sure}) before"
    if pair is not None:
        now, around = in_favour(pair, finding.winner, share=share)
        text += f", {now} ({around}) on these seeds"
    return f"{text}: {_verdict(finding, pair)}."


def _pair(finding: Finding, analysis: Analysis) -> ArmPair | None:
    """The difference of the same arms here; none where one of them has no runs."""
    arms = {finding.winner, finding.loser}
    same = (p for p in analysis.pairs if {p.a, p.b} == arms and p.measure == finding.measure)
    return next((pair for pair in same if pair.difference.seeds > 1), None)


def _verdict(finding: Finding, pair: ArmPair | None) -> str:
    if pair is None:
        return UNTESTED
    if not pair.winner:
        return OPEN
    if pair.winner != finding.winner:
        return TURNED
    return HELD if pair.p_holm < 0.05 else WEAKER


__all__ = ["confirmed_lines", "spoken_confirmed"]
