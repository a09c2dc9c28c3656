"""Options of stages and recipes: keyword arguments checked against the factory's signature."""

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from proxpo.errors import ProxpoError, fold, nearest, resolve

_READ_AS_VALUE = {"None": "none", "True": "on", "False": "off"}  # by YAML and --set


@functools.cache  # every recipe reads some ten signatures
def parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a factory's signature by name; annotations are types, Any where there is none.

    A method's signature also has the options that it passes on, which are not in its annotations.
    """
    # The annotations of a class are those of its fields, not of its arguments.
    called: Any = typing.cast(Any, factory).__init__ if isinstance(factory, type) else factory
    kinds = typing.get_type_hints(inspect.unwrap(called))
    found = {
        name: p.replace(
            annotation=kinds.get(name, Any if p.annotation is p.empty else p.annotation)
        )
        for name, p in inspect.signature(factory).parameters.items()
    }
    return types.MappingProxyType(found)


def bind(factory: Callable[..., Any], settings: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """`settings` in the factory's spelling and types, defaults filled in, unknown names refused."""
    known = parameters(factory)
    named = {resolve(k, known, what=f"option of {what}"): v for k, v in settings.items()}
    options = {k: named.get(k, p.default) for k, p in known.items()}
    missing = [k for k, v in options.items() if v is inspect.Parameter.empty]
    if missing:
        raise ProxpoError(f"{what} needs the option '{missing[0]}'")
    return {
        k: coerce(v, known[k].annotation, option=f"{what}: option '{k}'")
        for k, v in options.items()
    }


def descriptions(factory: Callable[..., Any]) -> dict[str, str]:
    """Sentences on a factory's parameters, from lines `name: ...` or `a, b: ...` of its docstring.

    A sentence ends before a blank line or the next such line.
    """
    return _read(factory)[1]


def prose(factory: Callable[..., Any]) -> str:
    """The factory's docstring without the paragraphs that describe its parameters."""
    return "\n".join(_read(factory)[0])


def _read(factory: Callable[..., Any]) -> tuple[list[str], dict[str, str]]:
    """Lines of the docstring outside paragraphs that begin with a parameter, and all sentences."""
    known = inspect.signature(factory).parameters
    texts: dict[str, str] = {}
    names: list[str] = []
    kept: list[str] = []
    inside = False
    for line in (inspect.getdoc(factory) or "").splitlines():
        head, colon, rest = line.partition(": ")
        listed = head.split(", ")
        if colon and all(name in known for name in listed):
            names, texts = listed, texts | dict.fromkeys(listed, rest)
            inside = inside or not kept[-1:] or not kept[-1].strip()
        elif not line.strip():
            names, inside = [], False
        else:
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        if not inside and (line.strip() or not kept or kept[-1].strip()):
            kept.append(line)
    return kept, texts


def coerce(value: Any, kind: Any, *, option: str) -> Any:
    """Converts `value` to one of the types `kind` allows; raises if it is none of them."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    allowed = typing.get_args(kind) if union else (kind,)
    for accepted in allowed:
        fits, converted = _as(value, accepted)
        if fits:
            return converted
    words = [word for accepted in allowed for word in _words(accepted)]
    word = _READ_AS_VALUE.get(str(value), value)
    for known in words:
        if isinstance(word, str) and fold(known) == fold(word):
            return known
    if words and isinstance(word, str):
        raise ProxpoError(f"{option}: unknown value {_quoted(word)}{nearest(word[:80], words)}")
    names = " or ".join(_name(accepted) for accepted in allowed)
    raise ProxpoError(f"{option} takes {names}, got {brief(value)}")


_INTERVALS = {  # in words
    "[0, inf]": "must not be negative",
    "(0, inf]": "must be positive",
    "[0, inf)": "must not be negative or infinite",
    "(0, inf)": "must be positive and finite",
    "[1, inf)": "must be 1 or more",
    "(-inf, inf)": "must be finite",
}


def check_numbers(by: str, interval: str, **values: float | int | None) -> None:
    """Refuses a number outside the interval: `check_numbers("gae", "[0, 1]", gamma=gamma)`.

    interval: `[` and `]` include their bound, `(` and `)` do not; none is in every interval
    """
    low, high = map(float, interval[1:-1].split(","))
    for name, x in values.items():
        if x is None or low < x < high:
            continue
        if not (x == low and interval[0] == "[") and not (x == high and interval[-1] == "]"):
            expected = _INTERVALS.get(interval, f"must be in {interval}")
            raise ProxpoError(f"{by}: {name} {expected}, got {x}")


def brief(value: Any) -> str:
    """The value as error messages show it, cut to one line."""
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python writes out, a foreign __repr__
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _quoted(word: str) -> str:
    return f"'{word}'" if len(word) <= 80 else brief(word)


def variations(kind: Any, value: Any) -> list[Any]:
    """Other values of an option of this type, near `value`: every word, the other truth, numbers.

    They are guesses, and a factory may refuse some; together they show what the option does.
    """
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    allowed = typing.get_args(kind) if union else (kind,)
    others: list[Any] = []
    for accepted in allowed:
        if accepted is type(None):
            others.append(None)
        elif accepted is bool:
            others += [True, False]
        elif accepted in (int, float):
            near = value if _as(value, float)[0] and math.isfinite(value) else 0
            others += [
                accepted(near + 1),
                accepted(near * 2),
                accepted(near // 2 if accepted is int else near / 2),
            ]
            others += [1, 3] if accepted is int else [0.05, 0.5, 1.5]
        else:
            others += _words(accepted)
    return [x for i, x in enumerate(others) if x != value and x not in others[:i]]


def _name(kind: Any) -> str:
    words = ", ".join(_words(kind))
    return words or ("none" if kind is type(None) else getattr(kind, "__name__", str(kind)))


def _words(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _as(value: Any, kind: Any) -> tuple[bool, Any]:
    if kind in (int, float):
        return _as_number(value, kind)
    if kind in (bool, str, type(None)):
        return isinstance(value, kind), value
    if typing.get_origin(kind) is Callable:
        return callable(value), value
    return not _words(kind), value


def _as_number(value: Any, kind: type) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
        return False, value  # numpy's numbers are real ones too
    if kind is int:
        whole = isinstance(value, numbers.Integral) or value % 1 == 0
        return whole, math.floor(value) if whole else value
    try:
        return True, float(value)
    except OverflowError:  # an integer beyond the largest float
        return False, value


__all__ = [
    "bind",
    "brief",
    "check_numbers",
    "coerce",
    "descriptions",
    "parameters",
    "prose",
    "variations",
]
