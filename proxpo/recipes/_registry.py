"""The catalogue: every method by slug, from this package, from `register` and from entry points."""

import functools
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from proxpo.errors import ProxpoError, fold, resolve
from proxpo.fields import LOADERS
from proxpo.stages import STAGES, check_free, check_stages
from proxpo.stages._options import bind, check_numbers, descriptions, parameters, prose, variations
from proxpo.types import KINDS, Recipe

CONFIDENCE = ("official code", "framework code", "paper formulas", "reconstructed")
ENTRY_POINTS = "proxpo.recipes"


@dataclass(frozen=True, kw_only=True)
class Procedure:
    """A method that is no composition of stages: its options, for the code of its domain.

    ranges: options by their interval, such as "[0, 1)"
    idle: options that have no effect beside the others
    """

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A catalogue entry: where the method comes from, and the factory that makes its recipe.

    domains: what it trains; a recipe also trains elsewhere, where its fields are known
    settings: defaults of a run with this method, by path, in place of the trainer's
    """

    slug: str
    paper: str
    confidence: str
    domains: tuple[str, ...] = ("language",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] = field(repr=False)

    @property
    def summary(self) -> str:
        return self.text.splitlines()[0]

    @property
    def text(self) -> str:
        return inspect.getdoc(self.make) or ""

    @property
    def prose(self) -> str:
        """The text without its sentences on single options, which `explained` has."""
        return prose(self.make)

    @property
    def defaults(self) -> dict[str, Any]:
        return {k: p.default for k, p in inspect.signature(self.make).parameters.items()}

    def explained(self) -> dict[str, str]:
        """A sentence on every option: the method's own, or that of the stage it is passed on to."""
        own = _own_descriptions(self.make)
        texts = {name: own.get(name) or self._by_effect(name) for name in self.defaults}
        return {name: text.rstrip(".") for name, text in texts.items()}

    def _by_effect(self, option: str) -> str:
        """The sentence of the stage's option that this one sets, or of one that it switches on."""
        made, default = self.make(), self.defaults[option]
        if not isinstance(made, Recipe):
            return ""
        before = dict(made.stages())
        for value in variations(parameters(self.make)[option].annotation, default):
            try:
                changed = self.make(**{option: value})
            except ProxpoError:
                continue
            for place, stage in changed.stages() if isinstance(changed, Recipe) else ():
                texts, old = descriptions(STAGES[stage.kind][stage.name]), before.get(place)
                for name, text in texts.items():
                    setting = stage.options[name]
                    if old is None and setting == value:
                        off = "none" if default is None else f"{default:g}"
                        return f"{text}; {off}: without {stage.kind}={stage.name}"
                    if old is not None and old.name == stage.name and setting != old.options[name]:
                        return text
        return ""


def _own_descriptions(make: Callable[..., Any]) -> dict[str, str]:
    """Sentences of the factory's docstring, and of the factories its options are passed on to."""
    passed: dict[str, str] = {}
    for p in inspect.signature(inspect.unwrap(make)).parameters.values():
        if isinstance(p.default, PassedOn):
            texts = _own_descriptions(p.default.factory)
            passed |= {name: text for name, text in texts.items() if name in p.default}
    return passed | descriptions(make)


METHODS: dict[str, Method] = {}
Options = Mapping[str, Any]


class PassedOn(dict[str, Any]):
    """Options that a method passes on: defaults by name, and the parameters they stand for."""

    def __init__(
        self, passed: Mapping[str, inspect.Parameter], factory: Callable[..., Any]
    ) -> None:
        super().__init__({name: p.default for name, p in passed.items()})
        self.parameters, self.factory = passed, factory


def options_of(factory: Callable[..., Any], *names: str, **defaults: Any) -> Options:
    """Options that a method passes on to a stage or to another method, which declares them.

        def palu(
            *, budget: Options = options_of(length_budget), base: Options = options_of(grpo, "eps")
        ) -> Recipe:
            return grpo(**base).replace(budget=(length_budget(**budget),))

    is `palu(*, target=0.8, tau=0.5, min_tokens=1, eps=1e-6)` to its callers. The options are those
    named, or all; a keyword gives an option a default of the method's own. An option that the
    method declares itself is not passed on.
    """
    known = parameters(factory)
    chosen = [*names, *(name for name in defaults if name not in names)] if names else known
    changed = {name: known[name].replace(default=value) for name, value in defaults.items()}
    return PassedOn({name: changed.get(name, known[name]) for name in chosen}, factory)


def register(
    slug: str,
    *,
    paper: str,
    confidence: str = "official code",
    domains: tuple[str, ...] = ("language",),
    settings: Mapping[str, Any] | None = None,
):
    """Registers a method: decorates a keyword-only factory that returns a Recipe or a Procedure.

        @proxpo.register("my-method", paper="arXiv:2601.00001")
        def my_method(*, clip_low: float = 0.2) -> Recipe: ...

    The slug is the name on the command line. Options must have defaults and must not be named like
    a stage, so that `--set ratio=...` always means the stage. `options_of` passes options on
    without declaring them again. `domains` and `settings` are those of `Method`.
    """
    if confidence not in CONFIDENCE:
        raise ProxpoError(
            f"{slug}: confidence '{confidence}' is not one of {', '.join(CONFIDENCE)}"
        )

    def decorate(factory: Callable[..., Any]) -> Callable[..., Any]:
        taken = METHODS[slug].make if slug in METHODS else None
        check_free(f"the method '{slug}'", taken, factory)
        declared = inspect.signature(factory).parameters
        groups = {
            name: [option for option in p.default if option not in declared]
            for name, p in declared.items()
            if isinstance(p.default, PassedOn)
        }
        public: dict[str, inspect.Parameter] = {}
        for name, p in declared.items():
            passed = {k: p.default.parameters[k] for k in groups.get(name, ())}
            public |= passed if name in groups else {name: p}
        clash = [name for name in public if name in KINDS]
        if clash:
            raise ProxpoError(f"{slug}: the option '{clash[0]}' has the name of a stage")
        if not inspect.getdoc(factory):
            raise ProxpoError(f"{slug}: the factory needs a docstring with the method's formula")

        @functools.wraps(factory)
        def make(**chosen: Any) -> Recipe | Procedure:
            options = bind(make, chosen, what=slug)
            arguments = {k: options[k] for k in declared if k not in groups}
            arguments |= {name: {k: options[k] for k in group} for name, group in groups.items()}
            made = replace(factory(**arguments), name=slug, options=options)
            return check_stages(made) if isinstance(made, Recipe) else _check_ranges(made)

        cast(Any, make).__signature__ = inspect.Signature(
            list(public.values()), return_annotation=Recipe
        )
        METHODS[slug] = Method(
            slug=slug,
            paper=paper,
            confidence=confidence,
            domains=domains,
            settings=settings or {},
            make=make,
        )
        return make

    return decorate


def _check_ranges(made: Procedure) -> Procedure:
    """Refuses numbers outside their intervals."""
    for interval, names in made.ranges.items():
        check_numbers(made.name, interval, **{name: made.options[name] for name in names})
    return made


@functools.cache
def load_recipes() -> None:
    """Imports the package's recipes, then those that other packages announce as entry points."""
    from importlib.metadata import entry_points

    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"proxpo.recipes.{module.name}")
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()


LOADERS.append(load_recipes)  # packages with recipes of their own may declare batch fields


def methods(domain: str | None = None) -> dict[str, Method]:
    """The whole catalogue by slug, or the methods of one domain."""
    load_recipes()
    return {s: m for s, m in sorted(METHODS.items()) if domain is None or domain in m.domains}


def method(name: str) -> Method:
    """The entry called `name`, whatever its case and hyphens; the nearest one is suggested."""
    known = methods()
    file = f"{name.partition(':')[0].removesuffix('.py')}.py"
    if os.path.isfile(file) and fold(name) not in map(fold, known):
        raise ProxpoError(
            f"unknown method '{name}'; {file} is read where an installed package announces it "
            f"under the entry point {ENTRY_POINTS}, or where its code is imported first: python -c "
            f"'import {Path(file).stem}; from proxpo.cli import main; main()' in place of proxpo"
        )
    return known[resolve(name, known, what="method")]


__all__ = [
    "ENTRY_POINTS",
    "METHODS",
    "Method",
    "Options",
    "Procedure",
    "load_recipes",
    "method",
    "methods",
    "options_of",
    "register",
]
