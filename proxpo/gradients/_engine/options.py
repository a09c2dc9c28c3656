"""Checks of the options that a transform is made with."""

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from proxpo.errors import ProxpoError


def check_numbers(
    maker: str, options: Mapping[str, Any], *, least: float = -math.inf, above: float = -math.inf
) -> None:
    """Refuses options that are no finite numbers, or lie below a bound."""
    kind = "a finite number"
    kind += f" >= {least:g}" if math.isfinite(least) else ""
    kind += f" > {above:g}" if math.isfinite(above) else ""
    for name, value in options.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value >= least and value > above):
            raise ProxpoError(f"{maker}: {name} must be {kind}, got {value!r}")


def check_count(maker: str, name: str, value: Any, *, least: int) -> None:
    """Refuses an option that is no whole number, or too small."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ProxpoError(f"{maker}: {name} must be a whole number >= {least}, got {value!r}")


def refuse_unused(
    make: Callable[..., Any], options: Mapping[str, Any], where: str, acting: str
) -> None:
    """Refuses options without effect, unless they have their default or ask for nothing (0, None).

    A default cannot be refused: recipes pass all their options. `acting` is a setting with which
    the options have an effect.
    """
    known = inspect.signature(make).parameters
    for name, value in options.items():
        if value and value != known[name].default:
            raise ProxpoError(
                f"{make.__name__}: {name}={value} has no effect {where}; it has one with {acting}"
            )
