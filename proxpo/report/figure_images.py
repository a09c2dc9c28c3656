"""Draws figures of a comparison as PNG and SVG, for papers and slides."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from proxpo.report.figures import Cloud, Curve, Figure, MeanPoint
from proxpo.runs.page import PALETTE, SOFT

DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.2, 1.6)),
    (0, (6, 2, 1.2, 2)),
    (0, (9, 2.5)),
    (0, (3, 2)),
    (0, (0.8, 2)),
    (0, (6, 2, 1.2, 2, 1.2, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "p", "<")
LOOK: Any = {
    "svg.hashsalt": "proxpo",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.parse_math": False,
}
INK, GRID = "#1f2430", "#e5e8ee"
WIDE = 6.4  # inches
MOST_INSIDE = 8  # names in a legend over the plot; more stand beside it
TINTS = ("#0b57c4", "#4b83d6", "#8aafe5", "#b9cff0", "#d8e3f5", "#2f70cd", "#6c9ade", "#a5c1ea")


class Style:
    """Colour, dash and marker of each arm, by its place in the plan."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.place = {arm: i for i, arm in enumerate(arms)}

    def colour(self, arm: str) -> str:
        return PALETTE[self.place[arm] % len(PALETTE)][0]

    def line(self, arm: str) -> dict[str, Any]:
        return {"color": self.colour(arm), "linestyle": DASHES[self.shape(arm)], "linewidth": 1.8}

    def marker(self, arm: str) -> str:
        return MARKERS[self.shape(arm)]

    def shape(self, arm: str) -> int:
        """One of eight; after eight arms the colours come again with other shapes."""
        i = self.place[arm]
        return (i + i // 8) % 8


def draw_figure(figure: Figure, arms: Sequence[str]) -> dict[str, bytes]:
    """The figure as {"png": ..., "svg": ...}."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context(LOOK):
        rows = len(figure.data) if figure.kind in ("forest", "bars") else 0
        tall = 1.3 + 0.36 * rows if rows else 3.7
        canvas = Canvas(figsize=(WIDE, tall), dpi=144)
        # Fixed margins: a layout engine takes longer than the drawing.
        names = max((len(row["arm"]) for row in figure.data), default=0) if rows else 0
        left = min(0.4, 0.1 + 0.012 * names) if rows else 0.11
        axis = canvas.add_axes((left, 0.52 / tall, 0.97 - left, 1 - 0.82 / tall))
        KINDS[figure.kind](axis, figure, Style(arms))
        _style_axis(axis, figure)
        _legend(axis, canvas)
        return {kind: _image(canvas, kind) for kind in ("png", "svg")}


def _label(name: str) -> str:
    """A name for the legend, from which matplotlib leaves out those that begin with `_`."""
    return f"\u200b{name}" if name.startswith("_") else name


def _image(canvas: Any, kind: str) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def _style_axis(axis: Any, figure: Figure) -> None:
    axis.set_title(figure.title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axis.set_xlabel(figure.x, color=SOFT)
    axis.set_ylabel(figure.y, color=SOFT)
    axis.grid(color=GRID, linewidth=0.7, axis="x" if figure.kind in ("forest", "bars") else "both")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(SOFT)
    axis.tick_params(colors=SOFT)
    if figure.log:
        axis.set_yscale("log")
    if figure.share:
        scored = axis.xaxis if figure.kind == "forest" else axis.yaxis
        scored.set_major_formatter(lambda value, _: f"{100 * value:g}")
        label = axis.set_xlabel if figure.kind == "forest" else axis.set_ylabel
        label(f"{figure.x if figure.kind == 'forest' else figure.y}, %", color=SOFT)


def _legend(axis: Any, canvas: Any) -> None:
    """The names: over the plot, or, where they are many, in a column that is added beside it."""
    _, names = axis.get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": INK}
    if not names:
        return
    if len(names) <= MOST_INSIDE:
        axis.legend(**look)
        return
    tall, added = canvas.get_figheight(), 0.6 + 0.07 * max(map(len, names))
    rows = int((tall - 0.6) / 0.165)
    columns = -(-len(names) // rows)
    whole = WIDE + columns * added
    place = axis.get_position()
    axis.set_position((place.x0 * WIDE / whole, place.y0, place.width * WIDE / whole, place.height))
    canvas.set_figwidth(whole)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=columns, **look)


def _curves(axis: Any, figure: Figure, style: Style) -> None:
    lines: list[Curve] = figure.data
    for curve in lines:
        if not curve.x:
            continue
        every = max(1, len(curve.x) // 9)
        axis.plot(
            curve.x,
            curve.mean,
            label=_label(curve.arm),
            marker=style.marker(curve.arm),
            markersize=4,
            markevery=(style.place[curve.arm] % every, every),
            **style.line(curve.arm),
        )
        if not math.isnan(curve.low[0]):
            axis.fill_between(
                curve.x,
                curve.low,
                curve.high,
                color=style.colour(curve.arm),
                alpha=0.15,
                linewidth=0,
            )


def _cloud(axis: Any, figure: Figure, style: Style) -> None:
    groups: list[Cloud] = figure.data
    for group in groups:
        colour = style.colour(group.arm)
        if len(group.hull) > 1:
            axis.fill(*zip(*group.hull), facecolor=colour, edgecolor=colour, alpha=0.15)
        axis.scatter(
            [p["x"] for p in group.points],
            [p["y"] for p in group.points],
            color=colour,
            marker=style.marker(group.arm),
            s=34,
            label=_label(group.arm),
        )


def _means(axis: Any, figure: Figure, style: Style) -> None:
    points: list[MeanPoint] = figure.data
    groups = list(dict.fromkeys(point.group for point in points if point.at))
    apart = min(0.06, 0.6 / max(1, len(groups)))  # within the place of a tick
    for number, group in enumerate(groups):
        own = sorted(
            (point for point in points if point.group == group and point.at),
            key=lambda point: figure.ticks.index(point.at),
        )
        arm = own[0].arm
        places = [
            figure.ticks.index(point.at) + (number - (len(groups) - 1) / 2) * apart for point in own
        ]
        means = [point.mean for point in own]
        bars = [
            (0.0, 0.0)
            if math.isnan(point.low)
            else (point.mean - point.low, point.high - point.mean)
            for point in own
        ]
        axis.errorbar(
            places,
            means,
            yerr=list(zip(*bars)),
            label=_label(group),
            marker=style.marker(arm),
            capsize=3,
            **style.line(arm),
        )
        taken = [(x, point.mean) for x, point in zip(places, own) if point.chosen]
        if taken:
            axis.scatter(*zip(*taken), s=170, facecolor="none", edgecolor=style.colour(arm))
    for point in points:
        if not point.at:
            axis.axhline(point.mean, label=_label(point.group), **style.line(point.arm))
    axis.set_xticks(range(len(figure.ticks)), figure.ticks)
    axis.set_xlim(-0.5, len(figure.ticks) - 0.5)


def _forest(axis: Any, figure: Figure, style: Style) -> None:
    rows: list[Mapping[str, Any]] = figure.data
    for y, row in enumerate(rows):
        colour = style.colour(row["arm"])
        axis.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=1.6)
        axis.plot(row["boot"], [y, y], color=colour, linewidth=6, alpha=0.35)
        fill = colour if row["decides"] else "white"
        axis.plot(row["mean"], y, style.marker(row["arm"]), color=colour, markerfacecolor=fill)
    axis.axvline(0, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
    axis.set_yticks(range(len(rows)), [f"vs {row['arm']}" for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _bars(axis: Any, figure: Figure, style: Style) -> None:
    rows: list[Mapping[str, Any]] = figure.data
    names = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    start = [0.0] * len(rows)
    for number, name in enumerate(names):
        wide = [row["parts"].get(name, 0.0) for row in rows]
        axis.barh(
            range(len(rows)), wide, left=start, height=0.62, label=name, color=TINTS[number % 8]
        )
        start = [a + b for a, b in zip(start, wide)]
    axis.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)


KINDS = {"curves": _curves, "cloud": _cloud, "means": _means, "forest": _forest, "bars": _bars}


__all__ = ["Style", "draw_figure"]
