"""Sentences on what a comparison does not show, and on choices that are in doubt."""

import math
from collections.abc import Sequence
from typing import Any

from proxpo.report.analysis import Analysis, ArmPair
from proxpo.report.findings import format_number, settings_text, unit
from proxpo.report.text import plural
from proxpo.runs.jsonlines import CUT_TOKENS

MOST_PAIRS = 6  # of arms in a sentence


def setting_warnings(analysis: Analysis) -> list[str]:
    """Lines on settings that make arms incomparable; they come before any number."""
    if not analysis.differing:
        return []
    line = (
        "Not comparable: settings differ beyond the arms, and between arms that differ in them "
        "nothing is claimed."
    )
    return [line, *analysis.differing]


def caveats(analysis: Analysis) -> list[str]:
    """Lines on conclusions that the numbers do not allow."""
    lines: list[str] = []
    if analysis.unknown and len(analysis.arms) > 1:
        lines.append(
            f"Settings unknown: the logs of {', '.join(analysis.unknown)} do not hold them, so "
            "task, model, data and budget may differ."
        )
    finals = [pair for pair in analysis.pairs if pair.measure == "final"]
    tested = [pair for pair in finals if pair.difference.seeds > 1]
    held = [pair for pair in tested if pair.difference.holds_zero]
    if tested and len(held) == len(finals):
        lines.append("No final score is shown to differ from another: every interval holds zero.")
    elif held:
        lines.append(f"No difference in final score is shown between {_pair_names(held)}.")
    constant = [pair for pair in tested if pair.difference.constant and not pair.barred]
    if constant:
        lines.append(
            f"Between {_pair_names(constant)} the final score differs by the same amount on every "
            "seed: without spread there is no interval, and nothing is claimed."
        )
    lines += _barred_lines(analysis)
    lines += _cuts_that_differ(analysis)
    lines += _judged_otherwise(analysis)
    lines += _choices_among_fewer(analysis)
    lines += _choices_in_doubt(analysis)
    lines += _choices_at_an_end(analysis)
    seeds = [pair.difference.seeds for pair in tested]
    if finals and not tested:
        lines.append("Fewer than two seeds in common: no difference can be tested.")
    elif untested := [pair for pair in finals if pair not in tested]:
        lines.append(
            f"Nothing is tested between {_pair_names(untested)}: fewer than two seeds in common."
        )
    if seeds and min(seeds) < 5:
        lines.append(
            f"With {plural(min(seeds), 'paired seed')} only large and steady differences can be "
            "shown; the bootstrap bands in the figures are too narrow at so few."
        )
    return lines


def _barred_lines(analysis: Analysis) -> list[str]:
    """A line for each reason why an interval that excludes zero supports no claim."""
    reasons: dict[str, list[ArmPair]] = {}
    for pair in analysis.pairs:
        if pair.barred and (pair.difference.decides or pair.difference.constant):
            reasons.setdefault(pair.barred, []).append(pair)
    return [
        f"Nothing is claimed between {_pair_names(pairs)}: {reason}."
        for reason, pairs in sorted(reasons.items())
    ]


def _cuts_that_differ(analysis: Analysis) -> list[str]:
    """A line on arms that depend on their micro-batches, where memory cut them unlike."""
    cuts: dict[str, set[float]] = {}
    for result in analysis.arms:
        runs = [{row.get(CUT_TOKENS, 0.0) for row in one.run.rows[1:]} for one in result.runs]
        if found := set[float]().union(*runs):
            cuts[result.arm.name] = found
    cuts = {name: found for name, found in cuts.items() if any(found)}
    if len(set[float]().union(*cuts.values())) < 2:
        return []
    words = [f"{name} at {_token_range(found)}" for name, found in cuts.items()]
    return [
        f"Memory cut micro-batches unlike, and these arms look at each by itself: "
        f"{'; '.join(words)}. A number for train.micro_batch, or fewer --jobs on a GPU, makes them "
        "alike."
    ]


def _token_range(cuts: set[float]) -> str:
    """`2,048 to 8,192 tokens, in part not at all`."""
    sizes = sorted({cut for cut in cuts if cut})
    ends = " to ".join(f"{size:,.0f}" for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{ends} tokens{'' if all(cuts) else ', in part not at all'}"


def _judged_otherwise(analysis: Analysis) -> list[str]:
    """Lines on differences in final score that the other kind of accuracy tells otherwise."""
    other = analysis.other
    if other is None:
        return []
    here, there = _winners(analysis), _winners(other)
    gone = [pair for pair in here if pair not in there]
    label = other.variant.label.partition(",")[0]
    lines: list[str] = []
    if gone:
        each = "the difference" if len(here) == 1 else f"{len(gone)} of {len(here)} differences"
        lines.append(
            f"In {label} {each} in final score {'is' if len(gone) == 1 else 'are'} not shown: "
            f"{_listed_pairs(gone, other)}."
        )
    if new := [pair for pair in there if pair not in here]:
        lines.append(f"In {label} alone there is {_listed_pairs(new, other)}.")
    return lines


def _winners(analysis: Analysis) -> list[tuple[str, str]]:
    """(winner, loser) of each difference in final score that the intervals support."""
    return [
        (pair.winner, pair.b if pair.winner == pair.a else pair.a)
        for pair in analysis.pairs
        if pair.measure == "final" and pair.winner
    ]


def _listed_pairs(pairs: Sequence[tuple[str, str]], analysis: Analysis) -> str:
    """`a over b (83.0 and 78.4 %)` of each, with their scores."""

    def scores(*arms: str) -> str:
        share = analysis.variant.share
        means = (analysis.result(arm).mean("final") for arm in arms)
        return f"{' and '.join(format_number(x, share=share) for x in means)}{unit(share)}"

    shown = [f"{a} over {b} ({scores(a, b)})" for a, b in pairs[:MOST_PAIRS]]
    more = f" and {len(pairs) - MOST_PAIRS} more" if len(pairs) > MOST_PAIRS else ""
    return f"{'; '.join(shown)}{more}"


def _choices_among_fewer(analysis: Analysis) -> list[str]:
    """A line for each set of swept settings that could not be chosen, with the arms."""
    missed: dict[str, list[str]] = {}
    for choice in analysis.comparison.chosen:
        failed = [settings_text(settings) for settings, score in choice.scores if score is None]
        if failed:
            missed.setdefault("; ".join(failed), []).append(choice.arm)
    return [
        f"The choice for {', '.join(arms)} was made without {failed}, whose runs failed."
        for failed, arms in missed.items()
    ]


def _choices_in_doubt(analysis: Analysis) -> list[str]:
    """A line for each arm that ends below what another of its settings had on the tuning seeds."""
    share = analysis.variant.share
    finals = {result.arm.name: result.mean("final") for result in analysis.arms}

    def score(value: float) -> str:
        return f"{format_number(value, share=share)}{unit(share)}"

    lines: list[str] = []
    for choice in analysis.comparison.chosen:
        tried = [(value, settings) for settings, value in choice.scores if value is not None]
        own = [value for value, settings in tried if settings == choice.settings]
        others = [pair for pair in tried if pair[1] != choice.settings]
        if not own or not others:
            continue
        final, (other, settings) = finals.get(choice.arm, math.nan), max(others, key=lambda x: x[0])
        if final < other:
            lines.append(
                f"The choice for {choice.arm} is in doubt: with {settings_text(choice.settings)} "
                f"it had {score(own[0])} on the tuning seeds and has {score(final)} here, below "
                f"the {score(other)} that {settings_text(settings)} had there. More tuning seeds "
                "would tell."
            )
    return lines


def _choices_at_an_end(analysis: Analysis) -> list[str]:
    """A line for each swept number whose smallest or largest value was chosen, with the arms."""
    ends: dict[tuple[str, Any, str], list[str]] = {}
    for choice in analysis.comparison.chosen:
        for key, value in choice.settings.items():
            tried = [settings[key] for settings, _ in choice.scores if key in settings]
            if not all(isinstance(one, (int, float)) for one in tried) or len(set(tried)) < 3:
                continue
            named = {min(tried): "smallest", max(tried): "largest"}
            if value in named:
                ends.setdefault((key, value, named[value]), []).append(choice.arm)
    return [
        f"{key}={value}, chosen for {', '.join(arms)}, is the {end} that was tried: a better one "
        "may lie beyond."
        for (key, value, end), arms in ends.items()
    ]


def _pair_names(pairs: Sequence[ArmPair]) -> str:
    names = list(dict.fromkeys(f"{pair.a} and {pair.b}" for pair in pairs))
    more = f" and {len(names) - MOST_PAIRS} more" if len(names) > MOST_PAIRS else ""
    return f"{'; '.join(names[:MOST_PAIRS])}{more}"


__all__ = ["caveats", "setting_warnings"]
