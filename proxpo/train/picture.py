"""curves.png of a finished run, and report.html with the same curves."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxpo.runs.files import write_whole
from proxpo.train.run_page import SavedBatch, read_samples, run_page

INK, GRID = "#1f2430", "#d9dde5"
COLOURS = ("#2f6fed", "#e4572e", "#2a9d8f", "#8a4fbf", "#c98a00", "#5c6b7a")


def panels(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(title, unit, [(metric, label)]) of every panel with a curve."""
    known = {name for row in rows for name, value in row.items() if value is not None}
    sampled = sorted(name for name in known if name.startswith("proxpo/eval/avg@"))
    passed = sorted(name for name in known if name.startswith("proxpo/eval/pass@"))[-1:]
    phases = sorted(name for name in known if name.startswith("proxpo/time/"))
    accuracy = "proxpo/eval/accuracy" in known
    rewards = [("proxpo/eval/reward", "greedy")]
    rewards += [
        (name, name.rsplit("/", 1)[1]) for name in known if name.startswith("proxpo/eval/reward@")
    ]
    wanted = [
        (
            "Validation accuracy",
            "",
            [("proxpo/eval/accuracy", "greedy")]
            + [(name, name.rsplit("/", 1)[1]) for name in [*sampled, *passed]],
        ),
        ("Validation reward", "", [] if accuracy else rewards),
        ("Training reward", "", [("reward", "mean of the batch")]),
        ("Drift from the start", "nats per response", [("proxpo/eval/kl", "KL(π‖π₀)")]),
        ("Diversity of samples", "", [("proxpo/eval/diversity", "held out")]),
        (
            "Entropy",
            "nats per token",
            [("proxpo/eval/entropy", "held out"), ("entropy", "in training")],
        ),
        (
            "Without a learning signal",
            "share",
            [
                ("completions/clipped_ratio", "responses cut at the limit"),
                ("frac_reward_zero_std", "prompts with equal rewards"),
                ("proxpo/gradient/zero", "updates with gradient 0"),
            ],
        ),
        (
            "Ratios",
            "",
            [("proxpo/ratio/ess", "ESS"), ("clip_ratio/region_mean", "clipped share")],
        ),
        ("Response length", "tokens", [("completions/mean_length", "mean")]),
        ("Gradient norm", "", [("grad_norm", "after the transform, before grad_clip")]),
        ("Time per step", "s", [(name, name.rsplit("/", 1)[1]) for name in phases]),
    ]
    shown = [(title, unit, [c for c in curves if c[0] in known]) for title, unit, curves in wanted]
    return [panel for panel in shown if panel[2]]


def draw_run(rows: Sequence[Mapping[str, Any]], *, title: str) -> Any:
    """All panels as one matplotlib figure."""
    from matplotlib.figure import Figure

    shown = panels(rows)
    columns = 2 if len(shown) > 1 else 1
    lines = math.ceil(len(shown) / columns)
    width, height = 5.4 * columns, 2.7 * lines + 0.5
    figure = Figure(figsize=(width, height))
    figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, y=1 - 0.1 / height)
    # Inches around each panel: fitting them to the labels would take longer than the drawing.
    left, right, below, above = 0.8, 0.2, 0.5, 0.3
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=below / height,
        top=1 - (above + 0.5) / height,
        wspace=(left + right) / (5.4 - left - right),
        hspace=(below + above) / (2.7 - below - above),
    )
    for number, (name, unit, curves) in enumerate(shown):
        axis = figure.add_subplot(lines, columns, number + 1)
        for colour, (metric, label) in zip(COLOURS * 3, curves):
            points = [(r["step"], r[metric]) for r in rows if r.get(metric) is not None]
            _curve(axis, points, colour, label)
        alone = f": {curves[0][1]}" if len(curves) == 1 and curves[0][1] else ""
        axis.set_title(name + alone, fontsize=10.5, loc="left", color=INK)
        axis.set_ylabel(unit, fontsize=9)
        axis.grid(color=GRID, linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8.5, colors=INK)
        axis.set_xlim(0, max(row["step"] for row in rows) or 1)  # one scale: steps line up
        axis.margins(x=0)
        axis.locator_params(axis="x", integer=True)
        if unit in ("s", "tokens", "nats per response"):
            high = axis.dataLim.y1  # from 0, a margin of the data's spread may be too thin to see
            axis.set_ylim(0, 1.05 * high if 0 < high < math.inf else None)
        if unit == "share":
            axis.set_ylim(-0.02, 1.02)
        if name == "Validation accuracy":
            axis.set_ylim(0, 1.02)
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        if len(curves) > 1:
            axis.legend(fontsize=8, frameon=False)
        if number >= len(shown) - columns:
            axis.set_xlabel("step", fontsize=9)
    return figure


def _curve(axis: Any, points: list[tuple[int, float]], colour: str, label: str) -> None:
    """Draws a line with dots; with many points a faint line and its running mean."""
    steps, values = zip(*points)
    if len(points) <= 40:
        axis.plot(steps, values, color=colour, label=label, linewidth=1.8, marker="o", markersize=3)
        return
    half = max(2, len(points) // 40)
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
    means = [sum(part) / len(part) for part in parts]
    axis.plot(steps, means, color=colour, label=label, linewidth=1.8)


def write_pictures(
    run: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    summary: Mapping[str, Any],
    samples: Sequence[Mapping],
    made: Any = None,
    saved: Sequence[SavedBatch] = (),
) -> None:
    """Writes curves.png and report.html to the run's folder; samples.png with a figure `made`."""
    figure = draw_run(rows, title=title)
    write_whole(run / "curves.png", _png(figure))
    picture = ""
    if made is not None:
        write_whole(run / "samples.png", _png(made))
        picture = _embedded(made, "Samples before and after")
    page = run_page(
        rows,
        panels(rows),
        title=title,
        summary=summary,
        answers=samples,
        samples=read_samples(run / "samples.jsonl"),
        made=picture,
        saved=saved,
    )
    write_whole(run / "report.html", page.encode())


def _embedded(figure: Any, words: str) -> str:
    code = base64.b64encode(_svg(figure)).decode()
    return f'<img alt="{words}" src="data:image/svg+xml;base64,{code}">'


def _png(figure: Any) -> bytes:
    """Drawn once; `savefig` draws twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    figure.set_dpi(150)
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _svg(figure: Any) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "proxpo"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


__all__ = ["draw_run", "panels", "write_pictures"]
