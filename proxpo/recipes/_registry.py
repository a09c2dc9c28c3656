"""The catalogue: every method by slug, from this package, from `register` and from entry points."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from proxpo.errors import ProxpoError, resolve
from proxpo.stages import check
from proxpo.stages._options import bind
from proxpo.types import KINDS, Recipe

CONFIDENCE = ("official code", "framework code", "paper formulas", "reconstructed")
ENTRY_POINTS = "proxpo.recipes"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A catalogue entry: where the method comes from, and the factory that makes its recipe."""

    slug: str
    paper: str
    confidence: str
    make: Callable[..., Recipe] = field(repr=False)

    @property
    def summary(self) -> str:
        return self.text.splitlines()[0]

    @property
    def text(self) -> str:
        return inspect.getdoc(self.make) or ""

    @property
    def defaults(self) -> dict[str, Any]:
        return {k: p.default for k, p in inspect.signature(self.make).parameters.items()}


METHODS: dict[str, Method] = {}


def register(slug: str, *, paper: str, confidence: str = "official code"):
    """Add a method: decorate a keyword-only factory that returns a Recipe.

        @proxpo.register("my-method", paper="arXiv:2601.00001")
        def my_method(*, clip: float = 0.2) -> Recipe: ...

    The slug is the name on the command line. Options must have defaults and must not be named like
    a stage, so that `--set ratio=...` always means the stage.
    """
    if confidence not in CONFIDENCE:
        raise ProxpoError(
            f"{slug}: confidence '{confidence}' is not one of {', '.join(CONFIDENCE)}"
        )

    def decorate(factory: Callable[..., Recipe]) -> Callable[..., Recipe]:
        parameters = inspect.signature(factory).parameters
        clash = [name for name in parameters if name in KINDS]
        if clash:
            raise ProxpoError(f"{slug}: the option '{clash[0]}' has the name of a stage")
        if not inspect.getdoc(factory):
            raise ProxpoError(f"{slug}: the factory needs a docstring with the method's formula")

        @functools.wraps(factory)
        def make(**given: Any) -> Recipe:
            options = bind(factory, given, what=slug)
            return check(replace(factory(**options), name=slug, options=options))

        METHODS[slug] = Method(slug=slug, paper=paper, confidence=confidence, make=make)
        return make

    return decorate


@functools.cache
def load_all() -> None:
    """Import the package's recipes, then those other packages announce as entry points."""
    from importlib.metadata import entry_points

    import proxpo.recipes

    for module in pkgutil.iter_modules(proxpo.recipes.__path__):
        importlib.import_module(f"proxpo.recipes.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


def methods() -> dict[str, Method]:
    """The whole catalogue, by slug."""
    load_all()
    return dict(sorted(METHODS.items()))


def method(name: str) -> Method:
    """The entry called `name`, whatever its case and hyphens; the nearest one is suggested."""
    known = methods()
    return known[resolve(name, known, what="method")]


__all__ = ["ENTRY_POINTS", "METHODS", "Method", "load_all", "method", "methods", "register"]
