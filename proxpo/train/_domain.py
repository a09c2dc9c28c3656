"""`Domain`: a kind of thing to train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxpo.recipes import Procedure
from proxpo.train._schema import Config
from proxpo.types import Recipe


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A kind of thing to train: its tasks, its methods, and the settings it reads.

    prefixes: of its tasks' names, before the colon; example: the name of one task
    method: taken where none is given; suggested: methods that a refusal names
    recipes: it also trains recipes of language models, where it knows their fields
    defaults: settings by path, in place of those of `Config`
    options: of methods that have them, in place of the method's own defaults
    check: refuses settings that do not fit each other
    unread: the settings by path that have no effect there with a method, and why
    """

    name: str
    prefixes: tuple[str, ...] = ()
    example: str
    method: str
    suggested: tuple[str, ...]
    recipes: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    unread: Callable[[Recipe | Procedure], Mapping[str, str]] = lambda made: {}
    check: Callable[[Config], None] = lambda config: None


__all__ = ["Domain"]
