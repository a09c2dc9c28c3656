"""The ranking, the paired differences and confirmed findings as HTML tables."""

import math

from proxpo.report.analysis import Analysis, ArmResult
from proxpo.report.confirmed import Confirmed, confirmed
from proxpo.report.findings import duration, format_number, run_counts, settings_text, span, unit
from proxpo.report.text import plural
from proxpo.runs.page import PALETTE, escape


def ranking_words(analysis: Analysis) -> str:
    words = f"By mean {analysis.variant.label}"
    if not math.isnan(analysis.end):
        words += f" at step {analysis.end:,.0f}"
        words += ", interpolated between evaluations" if analysis.interpolated else ""
    if any(run.role == "tune" for run in analysis.comparison.runs):
        words += "; settings chosen on tuning seeds, reported on others"
    return f"{words}. Bars are Student's 95 % intervals over seeds. The order alone proves nothing."


def ranking_table(analysis: Analysis) -> str:
    share = analysis.variant.share
    low, high = _scale(analysis)
    other = analysis.other
    beside = [other.variant.short] if other else []
    columns = ["final score", "", "IQM", *beside, "over training", "KL drift", "per step"]
    columns += ["runs", *["samples", "time", "KL at it"] * len(analysis.targets)]
    sortable = [text not in ("", "runs") for text in columns]
    heads = [
        (text or "interval", at if sorts else None)
        for at, (text, sorts) in enumerate(zip(columns, sortable), 1)
    ]
    groups = "".join(
        f'<th class="group" colspan="3" scope="colgroup">to reach {format_number(t, share=share)}'
        f"{unit(share)}</th>"
        for t in analysis.targets
    )
    wide = len(columns) - 3 * len(analysis.targets)
    top = f'<tr><td></td><td colspan="{wide}"></td>{groups}</tr>' if groups else ""
    cells = "".join(_head(text, at) for text, at in heads)
    body = "".join(_ranked(result, analysis, low, high) for result in analysis.arms)
    return (
        f'<table><thead>{top}<tr><th class="name" scope="col">arm</th>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _head(text: str, column: int | None) -> str:
    if column is None:
        return f'<th scope="col">{escape(text)}</th>'
    button = f'<button type="button">{escape(text)}</button>'
    return f'<th scope="col" data-column="{column}">{button}</th>'


def _scale(analysis: Analysis) -> tuple[float, float]:
    """From the lowest to the highest bound of all arms: the width of the interval column."""
    bounds = [
        bound
        for result in analysis.arms
        for interval in [result.student("final")]
        for bound in (interval.low, interval.high, interval.mean)
        if not math.isnan(bound)
    ]
    low, high = (min(bounds), max(bounds)) if bounds else (0.0, 1.0)
    margin = max(0.5, abs(low) / 2)  # half of a large number is still a difference to it
    return (low, high) if high > low else (low - margin, high + margin)


def _ranked(result: ArmResult, analysis: Analysis, low: float, high: float) -> str:
    share = analysis.variant.share
    chosen = f'<span class="set">{escape(settings_text(result.settings))}</span>'
    student = result.student("final")
    cells = [
        f'<th scope="row"><span class="key" data-key="{escape(result.arm.name)}"></span>'
        f"{escape(result.arm.name)}{chosen if result.settings else ''}</th>",
        _cell(student.mean, f"{format_number(student.mean, share=share)}{unit(share)}", "strong"),
        f"<td>{_range(result, analysis, low, high)}"
        f'<span class="small">{span(student, share=share)}</span></td>',
        _cell(
            result.iqm("final"), f"{format_number(result.iqm('final'), share=share)}{unit(share)}"
        ),
        *_beside(result, analysis),
        _cell(
            result.mean("area"), f"{format_number(result.mean('area'), share=share)}{unit(share)}"
        ),
        _cell(result.mean("kl"), format_number(result.mean("kl"))),
        _cell(result.mean("step_seconds"), duration(result.mean("step_seconds"))),
    ]
    warn = "warn" if result.failed else ""
    cells.append(f'<td class="{warn}">{escape(run_counts(result))}</td>')
    for i in range(len(analysis.targets)):
        cost = result.reach(i)
        arrived = f"({result.arrived(i)}/{len(result.runs)})"
        part = f'{format_number(cost.kl)} <span class="small">{arrived}</span>'
        cells.append(_cell(cost.samples, format_number(cost.samples)))
        cells.append(_cell(cost.seconds, duration(cost.seconds)))
        cells.append(_cell(cost.kl, part))
    return f'<tr data-arm="{escape(result.arm.name)}">{"".join(cells)}</tr>'


def _beside(result: ArmResult, analysis: Analysis) -> list[str]:
    """The cell of the other kind of accuracy, where there is one."""
    if (other := analysis.other) is None:
        return []
    share, mean = other.variant.share, other.result(result.arm.name).mean("final")
    return [_cell(mean, f"{format_number(mean, share=share)}{unit(share)}")]


def _cell(value: float, text: str, kind: str = "") -> str:
    worth = "" if not math.isfinite(value) else f"{value:.9g}"
    return f'<td class="{kind}" data-v="{worth}">{text}</td>'


def _range(result: ArmResult, analysis: Analysis, low: float, high: float) -> str:
    """The interval as a bar, all arms on one scale."""
    student = result.student("final")
    if math.isnan(student.mean):
        return ""
    place = lambda x: f"{100 * (x - low) / (high - low):.1f}%"  # noqa: E731
    number_of = _colour(analysis, result.arm.name)
    bar = ""
    if not math.isnan(student.low):
        wide = f"{100 * (student.high - student.low) / (high - low):.1f}%"
        bar = f'<i style="left:{place(student.low)};width:{wide}"></i>'
    return (
        f'<span class="range" style="color:var(--c{number_of})" aria-hidden="true">{bar}'
        f'<b style="left:{place(student.mean)}"></b></span>'
    )


def _colour(analysis: Analysis, arm: str) -> int:
    return arm_names(analysis).index(arm) % len(PALETTE)


def arm_names(analysis: Analysis) -> list[str]:
    """Arms in the order of the plan, which fixes their colours whatever the ranking."""
    planned = [arm.name for arm in analysis.comparison.arms]
    return planned or [result.arm.name for result in analysis.arms]


def pairs_table(analysis: Analysis) -> str:
    names = [result.arm.name for result in analysis.arms if result.runs]
    if len(names) < 2:
        return ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr data-arm="{escape(a)}"><th scope="row"><span class="key" data-key="{escape(a)}">'
        f"</span>{escape(a)}</th>{''.join(_against(analysis, a, b) for b in names)}</tr>"
        for a in names
    )
    words = (
        "Final score of the row minus that of the column, over the seeds both finished, with "
        "Student's 95 % interval. Coloured where the interval excludes zero."
    )
    return (
        f'<section id="pairs"><h2>Paired differences</h2><p class="lead">{words}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Paired differences">'
        f'<table class="matrix"><thead><tr><th class="name" scope="col">minus</th>{heads}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div></section>"
    )


def confirmed_table(analysis: Analysis) -> str:
    """The findings of an earlier comparison beside the differences here; "" where none are."""
    rows = "".join(map(_confirmed_row, confirmed(analysis)))
    if not rows:
        return ""
    words = (
        "What an earlier comparison of these arms has shown, and the same difference on these "
        "seeds, which it has not seen. With Student's 95 % interval; coloured where it excludes "
        "zero. † Not after Holm’s correction for the number of pairs."
    )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("before", "here", "verdict"))
    return (
        f'<section id="confirmed"><h2>What was to be confirmed</h2><p class="lead">{words}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="What was to be confirmed">'
        '<table class="matrix confirmed"><thead><tr><th class="name" scope="col">finding</th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _confirmed_row(each: Confirmed) -> str:
    kind = {"turned around": "lose", "not shown": "", "not tested": ""}.get(each.verdict, "win")
    mean, interval = each.before
    here = f"{each.here[0]}<small>{each.here[1]}</small>" if each.here else "–"
    return (
        f'<tr><th scope="row">{escape(each.winner)} over {escape(each.loser)}'
        f'<span class="set">{escape(each.measure)}</span></th>'
        f"<td>{mean}{'' if each.sure else ' †'}<small>{interval}</small></td>"
        f'<td class="{kind}">{here}</td><td>{each.verdict}</td></tr>'
    )


def _against(analysis: Analysis, a: str, b: str) -> str:
    if a == b:
        return '<td class="self">·</td>'
    pair, sign = analysis.pair(a, b), 1
    if pair is None:
        pair, sign = analysis.pair(b, a), -1
    if pair is None or not pair.difference.seeds:
        return '<td class="small">no common seed</td>'
    share, d = analysis.variant.share, pair.difference.student
    bounds = sorted((sign * d.low, sign * d.high))
    kind = "" if not pair.winner else "win" if pair.winner == a else "lose"
    shown = [format_number(x, share=share, signed=True) for x in (sign * d.mean, *bounds)]
    interval = "one seed" if math.isnan(d.low) else f"{shown[1]} to {shown[2]}"
    return (
        f'<td class="{kind}" title="{plural(pair.difference.seeds, "paired seed")}">{shown[0]}'
        f"<small>{interval}</small></td>"
    )


__all__ = ["arm_names", "confirmed_table", "pairs_table", "ranking_table", "ranking_words"]
