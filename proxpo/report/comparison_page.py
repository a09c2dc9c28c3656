"""HTML page of a comparison: findings, ranking, figures, every run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from proxpo.report.analysis import Analysis, MeasuredRun
from proxpo.report.caveats import caveats, setting_warnings
from proxpo.report.figures import Figure, digits
from proxpo.report.findings import (
    at_steps,
    budget_line,
    claims_by_winner,
    format_number,
    settings_text,
    unit,
)
from proxpo.report.html_tables import (
    arm_names,
    confirmed_table,
    pairs_table,
    ranking_table,
    ranking_words,
)
from proxpo.report.metrics import samples_drawn, seconds_spent
from proxpo.report.run_data import Run
from proxpo.report.text import plural
from proxpo.runs.page import escape, fill_page, json_ready
from proxpo.runs.yaml_file import dump_yaml

GLOSSARY = (
    ("final score", "the last evaluation step that all runs share"),
    ("interval", "Student's 95 % interval of the mean over seeds, x̄ ± t·s/√n, within 0 and 100 %"),
    (
        "band",
        "percentile bootstrap, 95 %, of the mean over seeds; too narrow below about ten seeds",
    ),
    (
        "IQM",
        "interquartile mean, the mean of the middle half of the runs; the mean below four runs",
    ),
    (
        "over training",
        "area under the score's curve divided by its length: the mean score on the way",
    ),
    (
        "to reach",
        "median over runs of the cost at which the score is first met, linear between evaluations; "
        "a run that never meets it counts as infinite",
    ),
    ("greedy, sampled", "accuracy of the kind that does not rank, at the same step"),
    ("KL at it", "mean KL drift of the runs that reached the score, at the moment they did"),
    (
        "A beats B",
        "said only when the interval of the paired differences (same seed, so same prompts) "
        "excludes zero, no run of A is missing, the differences are not all equal, and nothing but "
        "the arms differs: task, model, data, budget, batch and evaluation are the same. Each pair "
        "has its own 95 %: of twenty pairs of equals one would differ by chance. A † marks what "
        "does not survive Holm's correction for the number of pairs",
    ),
    ("chosen", "with a sweep, settings are chosen on tuning seeds and reported on others"),
)


def comparison_page(analysis: Analysis, drawn: Sequence[Figure]) -> str:
    """The page as HTML."""
    comparison = analysis.comparison
    question = f'<p class="question">{escape(comparison.question)}</p>'
    text = {
        "title": comparison.title,
        "budget": budget_line(analysis),
        "ranking_words": ranking_words(analysis),
        "runs_words": "Open a run for the command that repeats it and its full configuration.",
    }
    markup = {
        "question": question if comparison.question else "",
        "findings": _findings(analysis),
        "confirmed": confirmed_table(analysis),
        "ranking": ranking_table(analysis),
        "pairs": pairs_table(analysis),
        "figures": _figures(drawn),
        "runs": "".join(_run(analysis, run) for run in comparison.runs),
        "glossary": "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}.</dd>" for a, b in GLOSSARY),
    }
    return fill_page("compare", text=text, markup=markup, data=_data(analysis, drawn))


def _findings(analysis: Analysis) -> str:
    unsure = [*caveats(analysis), *analysis.notes]
    bad = [run for run in analysis.comparison.runs if run.status == "failed"]
    doubts = setting_warnings(analysis)
    panels = [_panel("failed", "Read this first", doubts)] if doubts else []
    panels.append(_shown(analysis))
    if unsure:
        panels.append(_panel("open", "What they do not show", unsure))
    if bad:
        lines = [f"{run.name}{_seed(run)}: {run.reason}" for run in bad]
        panels.append(_panel("failed", f"{plural(len(bad), 'run')} failed", lines))
    return f'<section class="findings" aria-label="Findings">{"".join(panels)}</section>'


def _shown(analysis: Analysis) -> str:
    """The panel of findings, one sentence a winner, and the meaning of their brackets."""
    final, area = (claims_by_winner(analysis, measure) for measure in ("final", "area"))
    if not final and not area:
        return _panel("open", "What the runs show", [_nothing(analysis)])
    points = "points, " if analysis.variant.share else ""
    words = (
        f"In brackets: 95 % interval of the paired differences ({points}same seeds, "
        f"{at_steps('final', analysis)})."
    )
    if any("†" in line for line in (*final, *area)):
        words += " † Not after Holm’s correction for the number of pairs."
    more = ""
    if area:
        items = "".join(f"<li>{escape(line)}.</li>" for line in area)
        heading = f"{plural(len(area), 'winner')} in mean score over training"
        state = "" if final else " open"
        more = f"<details{state}><summary>{heading}</summary><ul>{items}</ul></details>"
    lines = [f"{line}." for line in final] or ["No final score is shown to differ."]
    below = f'{more}<p class="small-text">{escape(words)}</p>'
    return _panel("shown" if final else "open", "What the runs show", lines, below)


def _nothing(analysis: Analysis) -> str:
    """The sentence that stands for missing findings."""
    tested = [pair.difference for pair in analysis.pairs if pair.difference.seeds > 1]
    if not tested:
        if len(analysis.arms) < 2:
            return "One arm: there is nothing to compare it with."
        return "No two arms have two seeds in common: no difference can be tested."
    if all(pair.holds_zero for pair in tested):
        return "No method is shown to be better than another."
    return "Nothing is claimed; the reasons stand beside."


def _panel(kind: str, title: str, lines: Sequence[str], below: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="panel {kind}"><h2>{escape(title)}</h2><ul>{items}</ul>{below}</div>'


def _seed(run: Run) -> str:
    return "" if run.seed is None else f", seed {run.seed}"


def _figures(drawn: Sequence[Figure]) -> str:
    sections: dict[str, list[Figure]] = {}
    for figure in drawn:
        sections.setdefault(figure.section, []).append(figure)
    return "".join(
        f"<section><h2>{escape(section)}</h2>"
        f'<div class="plots">{"".join(map(_figure, figures))}</div></section>'
        for section, figures in sections.items()
    )


def _figure(figure: Figure) -> str:
    lead = " lead-figure" if figure.key == "score" else ""
    unit_text = f' <span class="unit">{escape(figure.y)}</span>' if figure.y else ""
    return (
        f'<figure class="card{lead}" id="fig-{escape(figure.key)}"><h3>{escape(figure.title)}'
        f'{unit_text}</h3><div class="plot"></div>'
        f'<figcaption class="caption">{escape(figure.caption)}</figcaption></figure>'
    )


def _run(analysis: Analysis, run: Run) -> str:
    measured = _measured(analysis, run)
    share = analysis.variant.share
    final = "" if measured is None else f"{format_number(measured.final, share=share)}{unit(share)}"
    role = {"tune": "tuning", "report": "reported"}.get(run.role, "")
    state = f'<span class="state {run.status}">{run.status}</span>'
    seed = "" if run.seed is None else f"seed {run.seed}"
    reason = f'<p class="reason">{escape(run.reason)}</p>' if run.reason else ""
    return (
        f'<details class="run" data-arm="{escape(run.name)}" data-seed="{run.seed}"><summary>'
        f"<span>{escape(run.name)}</span><span>{seed}</span><span>{final}</span>"
        f'<span class="small-text">{role}</span>'
        f'<span class="small-text">{escape(settings_text(run.settings))}</span>{state}</summary>'
        f'<div class="inside">{reason}{_command(run)}'
        f'<p class="small-text">{escape(run.folder)}{_rows(run)}</p>{_config(run)}</div></details>'
    )


def _measured(analysis: Analysis, run: Run) -> MeasuredRun | None:
    each = (measured for result in analysis.arms for measured in result.runs)
    return next((measured for measured in each if measured.run is run), None)


def _rows(run: Run) -> str:
    return f", {plural(len(run.rows), 'row')} of metrics" if run.rows else ", no metrics"


def _command(run: Run) -> str:
    if not run.command:
        return f'<p class="small-text">Made elsewhere ({escape(run.source)}).</p>'
    return (
        f'<div class="command"><pre>{escape(run.command)}</pre>'
        '<button type="button" data-copy>Copy</button></div>'
    )


def _config(run: Run) -> str:
    if not run.config:
        return ""
    return f"<pre>{escape(dump_yaml(json_ready(run.config)))}</pre>"


def _data(analysis: Analysis, drawn: Sequence[Figure]) -> dict[str, Any]:
    """The data that the script draws."""
    runs = analysis.comparison.runs
    clocks = [_clock(run) for run in runs]
    names = arm_names(analysis)
    means = [_mean_clock([r for r in runs if r.name == name]) for name in names]
    axes = [
        "step",
        *(a for a in ("samples", "seconds") if any(clock and clock[a] for clock in means)),
    ]
    return json_ready(
        {
            "arms": names,
            "runs": [
                {
                    "arm": run.name,
                    "seed": run.seed,
                    "status": run.status,
                    "role": run.role,
                    "clock": clock,
                }
                for run, clock in zip(runs, clocks)
            ],
            "clocks": means,
            "axes": axes,
            "figures": drawn,
        }
    )


def _clock(run: Run) -> dict[str, Any] | None:
    """Samples and seconds spent up to a step."""
    spent, drawn = seconds_spent(run), samples_drawn(run)
    known = spent if len(spent.steps) else drawn
    if not len(known.steps):
        return None
    steps = known.steps[np.unique(np.linspace(0, len(known.steps) - 1, 60).astype(int))]
    return {
        "step": digits(steps),
        "seconds": digits(np.interp(steps, *spent)) if len(spent.steps) else None,
        "samples": digits(np.interp(steps, *drawn)) if len(drawn.steps) else None,
    }


def _mean_clock(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Samples and seconds up to a step, mean over an arm's finished, reported runs."""
    each = [_clock(run) for run in runs if run.counts]
    known = [clock for clock in each if clock is not None]
    if not known:
        return None
    steps = max((clock["step"] for clock in known), key=lambda clock: clock[-1])
    mean: dict[str, Any] = {"step": steps}
    for axis in ("seconds", "samples"):
        curves = [np.interp(steps, clock["step"], clock[axis]) for clock in known if clock[axis]]
        mean[axis] = digits(np.mean(curves, axis=0)) if len(curves) == len(known) else None
    return mean


__all__ = ["comparison_page"]
