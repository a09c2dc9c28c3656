"""Findings of an analysis as sentences, and numbers as text, for page, terminal and summary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from proxpo.report.analysis import Analysis, ArmPair, ArmResult
from proxpo.report.statistics import Interval
from proxpo.report.text import plural, setting_text

MINUS = "−"
MOST_LINES = 12  # of findings in a terminal
MEASURES = {"final": "final score", "area": "mean score over training"}


def format_number(value: float, *, share: bool = False, signed: bool = False) -> str:
    """Three significant digits, per cent for a share, a dash for NaN."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    value += 0.0  # no minus before a zero
    sign = "+" if signed and value > 0 else ""
    if share:
        text = f"{100 * value:.2f}" if 0 < abs(value) < 5e-4 else f"{100 * value:.1f}"
    elif value == 0:
        text = "0"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) < 1e-3:
        text = f"{value:.2e}"
    else:
        text = f"{value:.3g}"
    return f"{sign}{text}".replace("-", MINUS)


def unit(share: bool) -> str:
    return " %" if share else ""


def span(interval: Interval, *, share: bool = False, signed: bool = False) -> str:
    """An interval as `78.0 to 84.1`; a dash where one seed gives none."""
    if math.isnan(interval.low):
        return "–"
    low = format_number(interval.low, share=share, signed=signed)
    return f"{low} to {format_number(interval.high, share=share, signed=signed)}"


def duration(seconds: float) -> str:
    """A time as `45 s`, `12.3 min` or `3.1 h`."""
    if math.isnan(seconds) or math.isinf(seconds):
        return format_number(seconds)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={setting_text(value)}" for key, value in settings.items())


def claim(pair: ArmPair, analysis: Analysis) -> str:
    """The sentence that a pair supports; "" where it supports none."""
    if not pair.winner:
        return ""
    loser = pair.b if pair.winner == pair.a else pair.a
    points = " points" if analysis.variant.share else ""
    mean, interval = in_favour(pair, pair.winner, share=analysis.variant.share)
    sure = "" if pair.p_holm < 0.05 else "; not after correction for the number of pairs"
    return (
        f"{pair.winner} beats {loser} in {MEASURES[pair.measure]} by {mean}{points} "
        f"(95 % interval {interval}, {plural(pair.difference.seeds, 'paired seed')}, "
        f"{at_steps(pair.measure, analysis)}{sure})."
    )


def at_steps(measure: str, analysis: Analysis) -> str:
    """The steps of a measure: `step 80`, or `steps 0 to 80` of a mean over training."""
    first = f"s {analysis.steps[0]:,.0f} to" if measure == "area" else ""
    return f"step{first} {analysis.end:,.0f}"


def claims(analysis: Analysis) -> list[str]:
    """Every sentence that the paired intervals support."""
    return [text for pair in analysis.pairs if (text := claim(pair, analysis))]


def spoken_claims(analysis: Analysis) -> list[str]:
    """`claims` for a terminal: of many those that hold after correction, the others counted.

    Where these are many too, one line a winner, on the final score.
    """
    every = claims(analysis)
    if len(every) <= MOST_LINES:
        return every
    held = [pair for pair in analysis.pairs if pair.winner and pair.p_holm < 0.05]
    more = {"without correction": len(every) - len(held)}
    if len(held) <= MOST_LINES:
        return [*(claim(pair, analysis) for pair in held), *_unlisted(more)]
    final = [pair for pair in held if pair.measure == "final"]
    return [
        "Differences in final score, after correction for the number of pairs:",
        *_by_winner(final, analysis),
        *_unlisted({f"in {MEASURES['area']}": len(held) - len(final), **more}),
    ]


def _unlisted(counts: Mapping[str, int]) -> list[str]:
    """The line on differences that are counted alone: `3 more differences without correction`."""
    parts = [f"{plural(n, 'more difference')} {kind}" for kind, n in counts.items() if n]
    return [f"{', '.join(parts)}: the report lists them."] if parts else []


def claims_by_winner(analysis: Analysis, measure: str) -> list[str]:
    """The same findings, one sentence a winner; † where Holm's correction withdraws it."""
    return _by_winner([pair for pair in analysis.pairs if pair.measure == measure], analysis)


def _by_winner(pairs: Sequence[ArmPair], analysis: Analysis) -> list[str]:
    losers: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.winner:
            mean, interval = in_favour(pair, pair.winner, share=analysis.variant.share)
            loser = pair.b if pair.winner == pair.a else pair.a
            mark = "" if pair.p_holm < 0.05 else " †"
            losers.setdefault(pair.winner, []).append(f"{loser} by {mean} ({interval}){mark}")
    return [f"{winner} beats {', '.join(beaten)}" for winner, beaten in losers.items()]


def in_favour(pair: ArmPair, arm: str, *, share: bool) -> tuple[str, str]:
    """Mean and interval of `arm` minus the other of the pair."""
    d, sign = pair.difference.student, 1 if arm == pair.a else -1
    low, high = sorted((sign * d.low, sign * d.high))
    mean = format_number(sign * d.mean, share=share)
    return mean, span(Interval(mean=sign * d.mean, low=low, high=high), share=share)


def ranking_heading(analysis: Analysis) -> str:
    """The line above a ranking: the score and the step at which it is taken."""
    at = f"step {analysis.end:g}{', interpolated' if analysis.interpolated else ''}"
    if math.isnan(analysis.end):
        at = "no step in common"
    return f"{analysis.variant.label}, {at}, Student's 95 % interval:"


def ranking_lines(analysis: Analysis) -> list[str]:
    """One line an arm, the best first, for a terminal."""
    share = analysis.variant.share
    wide = max((len(result.arm.name) for result in analysis.arms), default=0)
    return [
        f"{rank:>2}. {result.arm.name:<{wide}}  "
        f"{format_number(result.mean('final'), share=share):>6}{unit(share)}  "
        f"[{span(result.student('final'), share=share)}]  {_beside(result, analysis)}"
        f"KL {format_number(result.mean('kl'))}  {run_counts(result)}"
        for rank, result in enumerate(analysis.arms, 1)
    ]


def _beside(result: ArmResult, analysis: Analysis) -> str:
    """The other kind of accuracy of an arm, `greedy 83.0 %`."""
    if (other := analysis.other) is None:
        return ""
    mean = format_number(other.result(result.arm.name).mean("final"), share=other.variant.share)
    return f"{other.variant.short} {mean}{unit(other.variant.share)}  "


def run_counts(result: ArmResult) -> str:
    """Number of runs of an arm: `3 seeds`, `2 seeds, 1 failed`."""
    parts = [plural(len(result.runs), "seed")]
    parts += [f"{result.failed} failed"] if result.failed else []
    parts += [f"{result.unfinished} unfinished"] if result.unfinished else []
    return ", ".join(parts)


def budget_line(analysis: Analysis) -> str:
    """Model, task, samples a step, steps and seeds of all runs, as far as they agree."""
    runs = [measured.run for result in analysis.arms for measured in result.runs] or list(
        analysis.comparison.runs
    )
    parts = [
        _agreed(runs, "model", "name", prefix="model "),
        _agreed(runs, "task", "name", prefix="task "),
    ]
    drawn = {_samples(run.config) for run in runs}
    if len(drawn) == 1 and (only := drawn.pop()):
        parts.append(only)
    if not math.isnan(analysis.end):
        parts.append(plural(round(analysis.end), "step"))
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    if seeds:
        parts.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}")
    return " · ".join(part for part in parts if part)


def _agreed(runs: list, section: str, key: str, *, prefix: str) -> str:
    values = {str((run.config.get(section) or {}).get(key, "")) for run in runs}
    return f"{prefix}{only}" if len(values) == 1 and (only := values.pop()) else ""


def _samples(config: Mapping[str, Any]) -> str:
    rollout = config.get("rollout") or {}
    prompts, each = rollout.get("prompts_per_step"), rollout.get("samples_per_prompt")
    return f"{prompts} prompts × {each} samples a step" if prompts and each else ""


__all__ = [
    "at_steps",
    "budget_line",
    "claim",
    "claims",
    "claims_by_winner",
    "duration",
    "format_number",
    "in_favour",
    "ranking_heading",
    "ranking_lines",
    "run_counts",
    "settings_text",
    "span",
    "spoken_claims",
    "unit",
]
