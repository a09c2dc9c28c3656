"""HTML page of a run: results, interactive curves, answers, samples to browse, saved batches."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxpo.batch_file import read_batch, saved_steps
from proxpo.errors import ProxpoError
from proxpo.inspection import inspect_batch
from proxpo.report.inspection_page import inspect_page
from proxpo.report.inspection_text import FIGURES, figure_texts, short
from proxpo.runs.files import write_whole
from proxpo.runs.jsonlines import read_rows
from proxpo.runs.page import escape, fill_page, json_ready
from proxpo.runs.yaml_file import dump_yaml
from proxpo.types import Recipe

MOST_POINTS, SMOOTHED_ABOVE = 600, 40
MOST_STEPS, MOST_SAMPLES, MOST_LETTERS, MOST_BATCHES = 120, 8, 4000, 12
# Words for results in summary.json; a pair of before and after is one entry.
PAIRS = (
    ("greedy accuracy", "accuracy_before", "accuracy_after", True),
    ("sampled accuracy", "sampled_before", "sampled_after", True),
    ("held-out reward", "reward_before", "reward_after", False),
)
SINGLE = {
    "kl": "KL to the start, nats a response",
    "entropy": "entropy, nats a token",
    "steps": "steps",
    "seconds": "time",
    "tokens": "tokens sampled",
    "tokens_per_second": "tokens a second",
}
TITLE = ("method", "model", "task", "seed", "out", "score", "unit", "no_signal")

Panel = tuple[str, str, list[tuple[str, str]]]  # title, unit, [(metric, label)]


class SavedBatch(NamedTuple):
    """A saved batch as the run's method sees it: figures by heading, and a page of its own."""

    step: int
    page: str
    figures: Mapping[str, str]


def run_page(
    rows: Sequence[Mapping[str, Any]],
    panels: Sequence[Panel],
    *,
    title: str,
    summary: Mapping[str, Any],
    answers: Sequence[Mapping] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    made: str = "",
    saved: Sequence[SavedBatch] = (),
) -> str:
    """One self-contained page: works offline, in light and dark, on a phone and on paper."""
    parts = {
        "curves": ("Curves", _figures(panels)),
        "made": ("Samples", f'<div class="panel made">{made}</div>' if made else ""),
        "answers": ("The same questions before and after", _answers(answers)),
        "samples": ("Responses in training", _browser(samples)),
        "batches": ("Saved batches", _batches(saved, summary)),
    }
    markup = {
        name: f'<section id="{name}"><h2>{escape(heading)}</h2>{inside}</section>' if inside else ""
        for name, (heading, inside) in parts.items()
    }
    links = [(name, heading) for name, (heading, inside) in parts.items() if inside]
    markup |= {
        "figures": markup.pop("curves"),
        "sections": "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading in links)
        + '<a href="#settings">Settings</a>',
        "tiles": "".join(_tile(name, value) for name, value in results(summary)),
        "notes": _notes(summary),
    }
    text = {
        "title": title,
        "subtitle": f"seed {summary.get('seed', 0)}, {summary.get('out', '')}",
        "config": dump_yaml(json_ready(summary.get("config", {}))),
        "command": f"proxpo train {summary.get('out', '.')}/config.yaml --out NEW_FOLDER",
    }
    return fill_page("run", text=text, markup=markup, data=_data(rows, panels, samples))


# --- numbers


def results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Results in words: (name, value), with values before and after training in one."""
    shown: list[tuple[str, str]] = []
    for name, before, after, share in PAIRS:
        if summary.get(after) is not None:
            named = summary.get("score", name) if after == "reward_after" else name
            first, last = (_value(summary.get(key), share) for key in (before, after))
            shown.append((str(named), f"{first.removesuffix(' %')} → {last}"))
    used = {key for _, *keys, _ in PAIRS for key in keys} | set(TITLE)
    unit = str(summary.get("unit", "tokens"))
    for key, value in summary.items():
        if key in used or value is None or isinstance(value, (dict, list)):
            continue
        name = SINGLE.get(key, key.replace("_", " ")).replace("tokens", unit)
        shown.append((name, duration(value) if key == "seconds" else _value(value)))
    return shown


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def _value(value: Any, share: bool = False) -> str:
    if value is None:
        return "–"
    if share:
        return f"{100 * value:.1f} %"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.3g}"


def _tile(name: str, value: str) -> str:
    return f'<div class="card tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>'


def _notes(summary: Mapping[str, Any]) -> str:
    notes = [*filter(None, [summary.get("no_signal")]), *resume_notes(summary)]
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes)
    return f'<ul class="panel notes">{lines}</ul>' if lines else ""


def resume_notes(summary: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting that changed on resuming."""
    return [
        "{setting} changed after step {step}: {before} -> {after}".format(**change)
        for change in summary.get("changes", ())
    ]


# --- curves


def _figures(panels: Sequence[Panel]) -> str:
    figures = "".join(
        f'<figure class="card" id="fig-panel{number}"><h3>{escape(title)} '
        f'<span class="unit">{escape(_unit(unit, curves))}</span></h3><div class="plot"></div>'
        '<figcaption class="caption"></figcaption></figure>'
        for number, (title, unit, curves) in enumerate(panels)
    )
    return f'<div class="plots">{figures}</div>' if figures else ""


def _unit(unit: str, curves: Sequence[tuple[str, str]]) -> str:
    return ", ".join(filter(None, [unit, curves[0][1] if len(curves) == 1 else ""]))


def _data(
    rows: Sequence[Mapping[str, Any]], panels: Sequence[Panel], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The data that the script draws."""
    places: dict[str, int] = {}
    figures = []
    for number, (title, unit, curves) in enumerate(panels):
        lines = [_line(rows, metric, label) for metric, label in curves]
        for place, line in enumerate(lines):
            places.setdefault(line["arm"], place)
        smoothed = any("raw" in line for line in lines)
        figures.append(
            {
                "key": f"panel{number}",
                "title": title,
                "kind": "curves",
                "caption": "Running mean; faint: every step." if smoothed else "",
                "x": "step",
                "y": unit or title,
                "share": title == "Validation accuracy",
                "legend": len(lines) > 1,
                "data": lines,
            }
        )
    clock = _clock(rows)
    return json_ready(
        {
            "arms": list(places),
            "places": places,
            "runs": [],
            "clocks": [clock] * (max(places.values(), default=0) + 1),
            "axes": ["step", *(name for name in ("tokens", "seconds") if clock[name])],
            "figures": figures,
            "samples": samples,
        }
    )


def _line(rows: Sequence[Mapping[str, Any]], metric: str, label: str) -> dict[str, Any]:
    """A curve; with many points its running mean, and the points as `raw`."""
    points = [(row["step"], row[metric]) for row in rows if _finite(row.get(metric))]
    points = [points[i] for i in even(len(points), MOST_POINTS)]
    x, y = [step for step, _ in points], [value for _, value in points]
    line: dict[str, Any] = {"arm": label, "x": x, "low": [None], "high": [None], "runs": []}
    if len(y) <= SMOOTHED_ABOVE:
        return {**line, "mean": y}
    half = max(2, len(y) // 40)
    near = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
    return {**line, "mean": [sum(part) / len(part) for part in near], "raw": y}


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _clock(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens and seconds spent up to a step."""
    timed = [row for row in rows if _finite(row.get("step_time"))]
    seconds, total = [0.0], 0.0
    for row in timed:
        total += row["step_time"]
        seconds.append(total)
    tokens = [row.get("num_tokens") for row in timed]
    return {
        "step": [0, *(row["step"] for row in timed)],
        "seconds": seconds if timed else None,
        "tokens": [0, *tokens] if timed and all(map(_finite, tokens)) else None,
    }


def even(count: int, most: int) -> Iterable[int]:
    """At most `most` of `count` places, evenly spread, the first and the last among them."""
    if count <= most:
        return range(count)
    return (round(i * (count - 1) / (most - 1)) for i in range(most))


# --- answers, samples and batches


def _answers(answers: Sequence[Mapping]) -> str:
    columns = ("prompt", "before", "after", "answer")
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(as_text(row[name]))}</td>' for name in columns)}</tr>"
        for row in answers
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in columns)
    table = f'<table class="answers"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0" role="region">{table}</div>' if body else ""


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Responses of some steps, evenly spread over the run: {"step", "responses"}."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in read_rows(path) if path.is_file() else ():
        responses = steps.setdefault(line["step"], [])
        if len(responses) < MOST_SAMPLES:
            responses.append(line)
    chosen = [sorted(steps)[i] for i in even(len(steps), MOST_STEPS)]
    return [{"step": step, "responses": [_sample(row) for row in steps[step]]} for step in chosen]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = row.get("answer")
    return {
        "prompt": as_text(row.get("prompt", ""))[:MOST_LETTERS],
        "completion": as_text(row.get("completion", ""))[:MOST_LETTERS],
        "answer": None if answer is None else as_text(answer)[:200],
        "reward": row.get("reward"),
    }


def _browser(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    return (
        '<div class="browse"><button type="button" id="sample-back" class="icon" '
        'aria-label="Earlier">‹</button>'
        f'<input type="range" id="sample-step" min="0" max="{len(samples) - 1}" '
        f'value="{len(samples) - 1}" aria-label="Step">'
        '<button type="button" id="sample-on" class="icon" aria-label="Later">›</button>'
        '<output id="sample-number"></output></div><div class="samples" id="sample-rows"></div>'
    )


def _batches(saved: Sequence[SavedBatch], summary: Mapping[str, Any]) -> str:
    if not saved:
        return ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in saved[0].figures)
    body = "".join(
        f'<tr><th scope="row"><a href="{escape(batch.page)}">step {batch.step}</a></th>'
        f"{''.join(f'<td>{escape(text)}</td>' for text in batch.figures.values())}</tr>"
        for batch in saved
    )
    meanings = "; ".join(f"{heading}: {meaning}" for _, heading, meaning in FIGURES)
    command = f"proxpo inspect grpo p3o --run {summary.get('out', '.')} --step {saved[-1].step}"
    return (
        f'<p class="lead">{escape(meanings)}.</p><div class="scroll" tabindex="0" role="region">'
        f'<table><thead><tr><th class="name" scope="col">batch</th>{heads}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><div class="command"><pre>{escape(command)}</pre>'
        '<button type="button" data-copy>Copy</button></div>'
    )


def inspect_saved(out: Path, recipe: Recipe) -> list[SavedBatch]:
    """Inspects batches that the run has saved, and writes a page for each beside it."""
    steps = saved_steps(out)
    found = []
    for step in (list(steps)[i] for i in even(len(steps), MOST_BATCHES)):
        try:
            file = read_batch(steps[step])
            inspection = inspect_batch(recipe, file.batch)
        except ProxpoError:  # of another run's method, or without a field that was too large
            continue
        page = steps[step].with_suffix(".html")
        source = f"{out}, step {step}"
        write_whole(page, inspect_page([inspection], file, source=source).encode())
        figures = {"loss": short(inspection.loss), **figure_texts(inspection)}
        found.append(SavedBatch(step, f"{page.parent.name}/{page.name}", figures))
    return found


def as_text(value: Any) -> str:
    """The value as text; the messages of a chat one below the other."""
    if isinstance(value, list) and all(isinstance(m, dict) and "content" in m for m in value):
        value = "\n".join(str(message["content"]) for message in value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


__all__ = ["SavedBatch", "inspect_saved", "read_samples", "results", "resume_notes", "run_page"]
