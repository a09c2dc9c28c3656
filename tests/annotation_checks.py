"""Checks of annotated arguments: beartype, applied once to each signature.

Stages are closures, made anew with every recipe, annotations included; jaxtyping asks for a check
each time, of a stub that has the closure's signature and nothing else. Signatures that read alike
in one place of the code get the same checked stub.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_known: dict[Any, Callable[..., Any]] = {}


def check(stub: Callable[..., Any]) -> Callable[..., Any]:
    code, defaults = stub.__code__, (stub.__defaults__, stub.__kwdefaults__)
    read = repr((stub.__annotations__, defaults))
    key = stub.__module__, stub.__qualname__, code.co_varnames, code.co_code, read
    if key not in _known:
        _known[key] = beartype(stub)
    return _known[key]
