"""Checks of annotated arguments and results: beartype's, made once for each definition.

jaxtyping's import hook puts `jaxtyping.jaxtyped` on every function and dataclass. Its own form
binds the arguments at every call and makes its checks anew for every closure, as all stages are:
two thirds of the time of a short training run. In the tests the `jaxtyped` of this module
replaces it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

# Two functions without a body: one takes the arguments, the other the result.
Checks = tuple[Callable[..., None], Callable[[Any], None]]
_check = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))  # a TypeError
_known: dict[CodeType, Checks] = {}
_scope_of_axes = functools.partial(jaxtyping.jaxtyped, "context")


def install() -> None:
    """Call it before the first import of a checked package."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
    """Decorates a function or a dataclass with the checks of its annotations."""
    return _checked


def _checked(thing: Any) -> Any:
    if isinstance(thing, FunctionType):
        if "triton" in thing.__globals__:  # a kernel of Triton, which compiles the function itself
            return thing
        return _wrapped(thing, _known_checks)
    if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
        thing.__init__ = _wrapped(thing.__init__, _checks_of)
    return thing


def _wrapped(function: Callable, make_checks: Callable[[Any], Checks]) -> Callable:
    """The function with its checks, which the first call makes."""
    checks = None

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        nonlocal checks
        if checks is None:
            checks = make_checks(function)
        arguments, result = checks
        with _scope_of_axes():
            arguments(*args, **kwargs)
            value = function(*args, **kwargs)
            result(value)
            return value

    return wrapped


def _known_checks(function: FunctionType) -> Checks:
    """Closures of one definition share their checks."""
    if function.__code__ not in _known:
        _known[function.__code__] = _checks_of(function)
    return _known[function.__code__]


def _checks_of(function: FunctionType) -> Checks:
    hints = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    returned = hints.pop("return", Any)
    signature = inspect.signature(function)
    bare = [
        each.replace(
            annotation=each.empty, default=each.default if each.default is each.empty else None
        )
        for each in signature.parameters.values()
    ]
    scope: dict[str, Any] = {}
    exec(f"def arguments{inspect.Signature(bare)}: ...\ndef result(value): ...", scope)
    arguments, result = scope["arguments"], scope["result"]
    arguments.__defaults__, arguments.__kwdefaults__ = (
        function.__defaults__,
        function.__kwdefaults__,
    )
    arguments.__annotations__, result.__annotations__ = hints, {"value": returned}
    for stub in (arguments, result):
        stub.__module__, stub.__qualname__ = function.__module__, function.__qualname__
    return _check(arguments), _check(result)


def _resolved(hint: Any, function: FunctionType) -> Any:
    """The hint without names in strings; anything where one is known to type checkers alone."""

    def holder(value): ...

    holder.__annotations__ = {"value": hint}
    try:
        return get_type_hints(holder, function.__globals__, include_extras=True)["value"]
    except NameError:
        return Any
