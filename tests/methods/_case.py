"""One way to run a method, as its test file declares it."""

from typing import Any, NamedTuple

from methods.loops import Reference


class Case(NamedTuple):
    """A method with settings, and its loss once more as plain loops.

    On `helpers.make_batch` each rule of the method acts on some tokens and leaves others alone.
    """

    slug: str
    settings: dict[str, Any]
    reference: Reference
