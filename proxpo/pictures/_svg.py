"""Plain SVG of a few panels: lines on axes, and strips of coloured cells.

Every number is rounded to a tenth of a pixel: rounding errors of another machine do not show.
Colours follow the reader's light or dark scheme; the background is transparent.
"""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxpo.runs.page import PALETTE, SOFT

Number = int | float
Point = tuple[Number, Number]
WIDTH, HEIGHT = 258, 200  # of one panel with its labels
LEFT, TOP, ACROSS, DOWN = 30, 22, 214, 140  # the axes inside it
LEVELS = 6  # shades of a strip
DARK_TEXT, DARK_GRID, GRID = "#aab3c0", "#3a4150", "#dfe3ea"
STYLES = {"up": 0, "down": 1, "other": 2}  # colours of PALETTE by name


@dataclass(frozen=True)
class Line:
    """A polyline in the units of its axes. style: up, down, other or soft."""

    points: Sequence[Point]
    style: str = "up"
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Note:
    """A short text at a place in the units of the axes. anchor: start, middle or end."""

    at: Point
    text: str
    style: str = "soft"
    anchor: str = "start"


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Lines on two axes. Values beyond the range are cut off at its border."""

    title: str
    x: str
    x_range: Point
    y_range: Point
    x_ticks: Sequence[Number]
    y_ticks: Sequence[Number]
    lines: Sequence[Line] = ()
    notes: Sequence[Note] = ()
    legend: Sequence[tuple[str, str]] = ()  # (text, style), at the right end of the title
    zero: Number | None = 0.0  # height of a stronger horizontal line
    mark: Number | None = None  # place of a dashed vertical line
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Rows of cells, blue above 0 and orange below; None is no cell. `gaps`: rows with space above.

    The darkest cell is the largest magnitude; magnitudes are shown in six shades.
    """

    title: str
    rows: Sequence[Sequence[Number | None]]
    labels: Sequence[str]
    x: str
    gaps: Sequence[int] = ()
    caption: str = ""


Panel = Axes | Strip


def draw_svg(panels: Sequence[Panel], title: str) -> str:
    """One panel, or two side by side, as an SVG file of one size."""
    parts = [_axes(p) if isinstance(p, Axes) else _strip(p) for p in panels]
    start = (2 - len(parts)) * WIDTH / 2
    inside = "".join(
        f'<g transform="translate({number(start + i * WIDTH)})">{p}</g>'
        for i, p in enumerate(parts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        f'width="{2 * WIDTH}" height="{HEIGHT}" role="img">'
        f"<title>{html.escape(title)}</title><desc>{html.escape(caption_of(panels))}</desc>"
        f"<style>{_style()}</style>{inside}</svg>\n"
    )


def caption_of(panels: Sequence[Panel]) -> str:
    """The captions of the panels, one after the other."""
    places = ("Left: ", "Right: ") if len(panels) == 2 else ("",)
    texts = (f"{place}{panel.caption}" for place, panel in zip(places, panels))
    return " ".join(text[:1].upper() + text[1:] for text in texts)


def number(value: Number) -> str:
    """One digit after the point at most; the offset keeps ties from falling either way."""
    text = f"{value + 1e-6:.1f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _style() -> str:
    def colours(shade: int, text: str, grid: str) -> str:
        named = (f".{name}{{--c:{PALETTE[place][shade]}}}" for name, place in STYLES.items())
        return f"text{{fill:{text}}}.g{{stroke:{grid}}}.soft,.z{{--c:{text}}}{''.join(named)}"

    return (
        "text{font:11px system-ui,sans-serif}.t{font-weight:600}.e{text-anchor:end}"
        ".m{text-anchor:middle}path{fill:none;stroke:var(--c)}path.l{stroke-width:2}"
        "path.d{stroke-width:1.4;stroke-dasharray:4 3}path.c{stroke:none;fill:var(--c)}"
        "path.g,path.z{stroke-width:1}circle{fill:var(--c)}text.n{fill:var(--c)}"
        f"{colours(0, SOFT, GRID)}"
        f"@media(prefers-color-scheme:dark){{{colours(1, DARK_TEXT, DARK_GRID)}}}"
    )


def _axes(panel: Axes) -> str:
    (x0, x1), (y0, y1) = panel.x_range, panel.y_range

    def place(point: Point) -> Point:
        x, y = (min(max(v, low), high) for v, low, high in zip(point, (x0, y0), (x1, y1)))
        return LEFT + (x - x0) / (x1 - x0) * ACROSS, TOP + (y1 - y) / (y1 - y0) * DOWN

    base = TOP + DOWN
    grid = "".join(
        f"M{LEFT} {number(place((x0, y))[1])}h{ACROSS}" for y in panel.y_ticks
    ) + "".join(f"M{number(place((x, y0))[0])} {TOP}v{DOWN}" for x in panel.x_ticks)
    out = [_text(LEFT, 13, panel.title, "t"), f'<path class="g" d="{grid}"/>']
    if panel.zero is not None:
        out.append(f'<path class="z" d="M{LEFT} {number(place((x0, panel.zero))[1])}h{ACROSS}"/>')
    if panel.mark is not None:
        out.append(f'<path class="z d" d="M{number(place((panel.mark, y0))[0])} {TOP}v{DOWN}"/>')
    out += [_text(LEFT - 5, place((x0, y))[1] + 4, _tick(y), "e") for y in panel.y_ticks]
    out += [_text(place((x, y0))[0], base + 14, _tick(x), "m") for x in panel.x_ticks]
    out.append(_text(LEFT + ACROSS / 2, base + 31, panel.x, "m"))
    for line in panel.lines:
        at = [place(p) for p in line.points]
        if line.dots:
            out += [
                f'<circle class="{line.style}" cx="{number(x)}" cy="{number(y)}" r="2.6"/>'
                for x, y in at
            ]
        else:
            kind = "d" if line.dashed else "l"
            out.append(f'<path class="{line.style} {kind}" d="{_path(at)}"/>')
    out += [
        _text(LEFT + ACROSS - 38 * i, 13, text, f"n e {style}")
        for i, (text, style) in enumerate(reversed(panel.legend))
    ]
    for note in panel.notes:
        x, y = place(note.at)
        anchor = {"start": "", "middle": " m", "end": " e"}[note.anchor]
        out.append(_text(x, y, note.text, f"n {note.style}{anchor}"))
    return "".join(out)


def _strip(panel: Strip) -> str:
    width = max(len(row) for row in panel.rows)
    gap = 5.0
    cell_w = (ACROSS - 2) / width
    cell_h = (DOWN - gap * len(panel.gaps)) / len(panel.rows)
    largest = max((abs(v) for row in panel.rows for v in row if v is not None), default=0.0)
    shades: dict[tuple[str, int], list[str]] = {}
    out, y = [_text(LEFT, 13, panel.title, "t")], float(TOP)
    for i, row in enumerate(panel.rows):
        y += gap if i in panel.gaps else 0.0
        for j, value in enumerate(row):
            if value is None:
                continue
            share = abs(value) / largest if largest > 0 else 0.0
            level = int(share * LEVELS + 1 - 1e-6) if share > 1e-6 else 0
            style = "soft" if not level else "up" if value > 0 else "down"
            box = (
                f"M{number(LEFT + j * cell_w)} {number(y)}h{number(cell_w - 1)}"
                f"v{number(cell_h - 2)}h{number(1 - cell_w)}z"
            )
            shades.setdefault((style, level), []).append(box)
        out.append(_text(LEFT - 6, y + cell_h / 2 + 3, panel.labels[i], "e"))
        y += cell_h
    for (style, level), boxes in sorted(shades.items()):
        strength = f"{0.12 if not level else 0.15 + 0.85 * level / LEVELS:.2f}"
        out.append(f'<path class="c {style}" opacity="{strength}" d="{"".join(boxes)}"/>')
    out.append(_text(LEFT + ACROSS / 2, TOP + DOWN + 31, panel.x, "m"))
    return "".join(out)


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def _text(x: Number, y: Number, text: str, kind: str) -> str:
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{html.escape(text)}</text>'


def _tick(value: Number) -> str:
    return f"{value:g}".replace("-", "−")


def same_picture(a: str, b: str) -> bool:
    """True if two files differ by rounding errors in their numbers alone."""
    texts, numbers = zip(*(_split(text) for text in (a, b)))
    return texts[0] == texts[1] and all(abs(x - y) <= 0.11 for x, y in zip(*numbers, strict=True))


def _split(text: str) -> tuple[list[str], list[float]]:
    parts = re.split(r"(-?\d+\.?\d*)", text)
    return parts[::2], [float(x) for x in parts[1::2]]


__all__ = [
    "Axes",
    "Line",
    "Note",
    "Number",
    "Panel",
    "Point",
    "Strip",
    "caption_of",
    "draw_svg",
    "same_picture",
]
