"""Options of stages and recipes: keyword arguments checked against the factory's signature."""

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from proxpo.errors import ProxpoError, resolve

_WORDS = {"None": "none", "True": "on", "False": "off"}  # YAML and --set read these words as values


def bind(factory: Callable[..., Any], given: Mapping[str, Any], *, what: str) -> dict[str, Any]:
    """`given` in the factory's spelling and types, defaults filled in, unknown names refused."""
    parameters = inspect.signature(factory).parameters
    named = {resolve(k, parameters, what=f"option of {what}"): v for k, v in given.items()}
    options = {k: named.get(k, p.default) for k, p in parameters.items()}
    missing = [k for k, v in options.items() if v is inspect.Parameter.empty]
    if missing:
        raise ProxpoError(f"{what} needs the option '{missing[0]}'")
    kinds = typing.get_type_hints(inspect.unwrap(factory))
    return {
        k: coerce(v, kinds.get(k, Any), option=f"{what}: option '{k}'") for k, v in options.items()
    }


def coerce(value: Any, kind: Any, *, option: str) -> Any:
    """`value` as one of the types `kind` allows; a clear line if it is none of them."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    allowed = typing.get_args(kind) if union else (kind,)
    for one in allowed:
        word = _WORDS.get(str(value), value)
        if typing.get_origin(one) is typing.Literal and isinstance(word, str):
            return resolve(word, typing.get_args(one), what=f"{option}: value")
        fits, converted = _as(value, one)
        if fits:
            return converted
    names = " or ".join(_name(one) for one in allowed)
    raise ProxpoError(f"{option} takes {names}, got {value!r}")


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    return "none" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _as(value: Any, kind: Any) -> tuple[bool, Any]:
    number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    )
    if kind is float:
        return number, float(value) if number else value
    if kind is int:
        whole = number and math.isfinite(value) and float(value).is_integer()
        return whole, int(value) if whole else value
    if kind in (bool, str, type(None)):
        return isinstance(value, kind), value
    return typing.get_origin(kind) is not typing.Literal, value


__all__ = ["bind", "coerce"]
