"""Parts that panels on two axes share: the frame, curves of functions, lines to compare with."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from proxpo.pictures._svg import Axes, Line, Number, Point

Method = TypeVar("Method")
Fields = dict[str, Any]
UNIT, THREE, FOUR = (0, 0.5, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4)  # ticks


def panel(
    title: str, x: str, x_ticks: Sequence[Number], y_ticks: Sequence[Number], **fixed: Any
) -> Callable[[Callable[[Method], Fields]], Callable[[Method], Axes]]:
    """Turns a function that returns fields of `Axes` into one that returns the panel.

    The caption is the function's docstring, the ranges are those of the ticks; `fixed` and then the
    function's own fields replace them.
    """
    frame: Fields = {"title": title, "x": x, "x_ticks": x_ticks, "y_ticks": y_ticks}
    frame |= {"x_range": (x_ticks[0], x_ticks[-1]), "y_range": (y_ticks[0], y_ticks[-1])}

    def decorate(fields: Callable[[Method], Fields]) -> Callable[[Method], Axes]:
        text = " ".join((fields.__doc__ or "").split())
        caption = {"caption": text[:1].lower() + text[1:]}
        return lambda method: Axes(**frame | caption | fixed | fields(method))

    return decorate


def spaced(low: Number, high: Number, count: int = 61) -> list[float]:
    """`count` numbers from low to high."""
    return [low + i * (high - low) / (count - 1) for i in range(count)]


def curve(f: Callable[[float], float], xs: Sequence[float], style: str = "up") -> Line:
    """The line of y = f(x)."""
    return Line([(x, f(x)) for x in xs], style)


def soft(points: Sequence[Point]) -> Line:
    """A dashed line to compare with."""
    return Line(points, "soft", dashed=True)


__all__ = ["FOUR", "THREE", "UNIT", "Fields", "curve", "panel", "soft", "spaced"]
