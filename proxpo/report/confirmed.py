"""Findings of an earlier comparison beside the same differences on seeds that it had not seen."""

from collections import Counter
from dataclasses import dataclass

from proxpo.compare.plan import Finding
from proxpo.report.analysis import Analysis, ArmPair
from proxpo.report.findings import MEASURES, MOST_LINES, format_number, in_favour, span
from proxpo.report.statistics import Interval


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A finding and the difference of the same arms here, winner minus loser, as text."""

    winner: str
    loser: str
    measure: str
    before: tuple[str, str]  # mean and interval
    sure: bool  # before: after correction
    here: tuple[str, str] | None  # none where one of the two has no runs
    verdict: str


def confirmed(analysis: Analysis) -> list[Confirmed]:
    """Every finding that was to be confirmed, with its verdict."""
    return [_confirmed(finding, analysis) for finding in analysis.comparison.confirms]


def _confirmed(finding: Finding, analysis: Analysis) -> Confirmed:
    share = analysis.variant.share
    arms = {finding.winner, finding.loser}
    same = (p for p in analysis.pairs if {p.a, p.b} == arms and p.measure == finding.measure)
    pair = next((pair for pair in same if pair.difference.seeds > 1), None)
    interval = Interval(mean=finding.mean, low=finding.low, high=finding.high)
    return Confirmed(
        winner=finding.winner,
        loser=finding.loser,
        measure=MEASURES.get(finding.measure, finding.measure),
        before=(format_number(finding.mean, share=share), span(interval, share=share)),
        sure=finding.p_holm < 0.05,
        here=None if pair is None else in_favour(pair, finding.winner, share=share),
        verdict=_verdict(finding, pair),
    )


def _verdict(finding: Finding, pair: ArmPair | None) -> str:
    if pair is None:
        return "not tested"
    if not pair.winner:
        return "not shown"
    if pair.winner != finding.winner:
        return "turned around"
    return "held" if pair.p_holm < 0.05 else "held, not after correction"


def confirmed_lines(analysis: Analysis) -> list[str]:
    """A sentence for each finding that was to be confirmed, with its verdict at the end."""
    return [_line(each, analysis) for each in confirmed(analysis)]


def spoken_confirmed(analysis: Analysis) -> list[str]:
    """`confirmed_lines` for a terminal: of many those on the final score, the others counted."""
    every = confirmed(analysis)
    shown = every
    if len(every) > MOST_LINES:
        shown = [each for each in every if each.measure == MEASURES["final"]][:MOST_LINES]
    counts = Counter(each.verdict for each in every if each not in shown)
    words = "; ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    return [
        *(["What was to be confirmed:"] if every else []),
        *(_line(each, analysis) for each in shown),
        *([f"Others: {words}. The report lists them."] if counts else []),
    ]


def _line(each: Confirmed, analysis: Analysis) -> str:
    points = " points" if analysis.variant.share else ""
    (mean, interval), doubt = each.before, "" if each.sure else ", not after correction"
    here = f", {each.here[0]} ({each.here[1]}) on these seeds" if each.here else ""
    return (
        f"{each.winner} over {each.loser} in {each.measure}: {mean}{points} ({interval}{doubt}) "
        f"before{here}: {each.verdict}."
    )


__all__ = ["Confirmed", "confirmed", "confirmed_lines", "spoken_confirmed"]
